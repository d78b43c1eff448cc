"""What a file that is not what its name says turns out to be: the usual accidents of copying and downloading."""

from __future__ import annotations


def text_damage(raw: bytes) -> str | None:
    """One sentence, with the next step, for a file that should hold JSON; None where nothing is obvious."""
    common = _common(raw)
    if common:
        return common
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return "starts with a byte-order mark (BOM), which JSON does not allow. Save it as UTF-8 without BOM."
    return None


def weights_damage(raw: bytes) -> str | None:
    """The same for the first bytes of a weight file."""
    return _common(raw)


def _common(raw: bytes) -> str | None:
    start = raw[:1024].lstrip()
    if not raw:
        return "the file is empty. Copy or download it again."
    if not start.strip(b"\0"):
        return "holds nothing but blanks or zeros. Copy or download it again."
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself. Run `git lfs pull` in that repository."
    if start[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML page, not the file itself (a login or error page was saved). Download it again."
    return None

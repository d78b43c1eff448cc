"""lm-evaluation-harness over many adapters in one pass. Needs the `lm-eval` extra.

    lm = MultiLoraLM(model, tokenizer, ["sql", "poet", None], batch_size=32)
    results = lm.evaluate(["arc_easy"], num_fewshot=2)
    results["sql"]["results"]["arc_easy"]   # what lm_eval.simple_evaluate returns, for each adapter

The first adapter's turn answers each request for all adapters, in batches that mix them; the other turns find their
answers ready. Tasks, few-shot examples, filters and metrics are the harness's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError, ModelError
from ..generation.ids import to_key
from ..generation.mixin import MultiLoraMixin

try:
    import lm_eval
    from lm_eval import utils
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError(
        f"hf_multilora.integrations.lm_eval needs {error.name}: pip install 'hf-multilora[lm-eval]'"
    ) from error

BASE = "base"
_OURS = ("model", "model_args", "batch_size", "max_batch_size", "device", "use_cache")

Tokens = list[int]
Answers = dict[str, list[Any]]  # name -> an answer for each request


class MultiLoraLM(HFLM):
    """An enabled decoder-only model as the harness sees one, for several adapters at once.

    Args:
        model: an enabled model.
        tokenizer: of the model.
        adapters: ids (names, None for the base, or mixes), each called by its name in the results ("base" for None),
            or `{name: id}`. Names that are folders or hub ids are loaded on demand.
        batch_size: rows of a batch, of all adapters together.
        options: of lm_eval.models.huggingface.HFLM (max_length, add_bos_token, ...).

    Raises:
        ModelError: the model is not enabled.
        ConfigError: no adapters, two of one name, or `batch_size="auto"`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adapters: Sequence[Any] | Mapping[str, Any],
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        if not isinstance(model, MultiLoraMixin):
            raise ModelError("MultiLoraLM needs an enabled model: call enable_multilora(model) first.")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: expected a number of rows.")
        self.adapters = _named(adapters)
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, **options)
        self._ready: dict[tuple[str, int], tuple[list[Any], Answers]] = {}
        self._asked: str | None = next(iter(self.adapters)) if len(self.adapters) == 1 else None
        self._turn = 0
        self._rows: list[Any] = []

    def evaluate(self, tasks: Any, *, task_manager: Any = None, **options: Any) -> dict[str, Any]:
        """`lm_eval.simple_evaluate` for every adapter, in one pass over the model.

        Args:
            tasks, task_manager, options: of lm_eval.simple_evaluate.

        Returns:
            dict: adapter's name -> what simple_evaluate returns.

        Raises:
            ConfigError: an option that this object has already, or `use_cache`, whose keys know of no adapters.
        """
        refused = sorted(set(options).intersection(_OURS))
        if refused:
            raise ConfigError(
                f"evaluate does not take {', '.join(refused)}: the model and its batches are set already."
            )
        loader = _Once(task_manager or TaskManager())
        before, results = self._asked, {}
        try:
            for name in self.adapters:
                self._asked, self._turn = name, 0
                results[name] = lm_eval.simple_evaluate(model=self, tasks=tasks, task_manager=loader, **options)
        finally:
            self._asked, self._turn = before, 0
            self._ready.clear()
        return results

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # The harness's own method makes tokens of the texts and returns what _loglikelihood_tokens does.
        own = super().loglikelihood
        return self._answered("loglikelihood", requests, lambda: own(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        def answer() -> Answers:
            windows, owners = [], []
            for number, request in enumerate(requests):
                (text,) = request.args
                rolling = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                for window in map(utils.make_disjoint_window, rolling):
                    windows.append((None, *window))
                    owners.append(number)
            found = self._loglikelihood_tokens(windows)
            sums = {name: [0.0] * len(requests) for name in found}
            for name, answers in found.items():
                for owner, (value, _) in zip(owners, answers, strict=True):
                    sums[name][owner] += value
            return sums

        return self._answered("loglikelihood_rolling", requests, answer)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        own = super().generate_until

        def answer() -> Answers:
            found: Answers = {}
            for names in self._groups():  # not in waves: the harness's stopping criteria count the rows of one batch
                asked = [
                    _Request((_Context(request.args[0], name), *request.args[1:]))
                    for name in names
                    for request in requests
                ]
                texts = own(asked, disable_tqdm=disable_tqdm)
                n = len(requests)
                found |= {name: texts[i * n : (i + 1) * n] for i, name in enumerate(names)}
            return found

        return self._answered("generate_until", requests, answer)

    def tok_batch_encode(self, strings: Any, *args: Any, **kwargs: Any) -> Any:
        """Beside the tokens, note whose the rows of the batch are."""
        self._rows = [self.adapters[text.adapter] for text in strings if isinstance(text, _Context)]
        return super().tok_batch_encode(strings, *args, **kwargs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        return super()._model_generate(context, max_length, stop, adapter_ids=self._rows, **kwargs)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
        """The sum of log-probabilities of each continuation, and whether it is the greedy one, for every adapter.

        Args:
            requests: (texts, context's tokens, continuation's tokens) each.
        """
        found: Answers = {name: [None] * len(requests) for name in self.adapters}
        for names in self._groups():
            # What asks for the same tokens is computed once: choices of one token each, for example.
            rows: dict[tuple[str, tuple[int, ...]], list[tuple[int, Tokens]]] = {}
            for number, (_, context, continuation) in enumerate(requests):
                tokens = tuple((context + continuation)[-(self.max_length + 1) :][:-1])
                for name in names:
                    rows.setdefault((name, tokens), []).append((number, continuation))
            longest_first = sorted(rows, key=lambda row: -len(row[1]))
            for start in range(0, len(longest_first), self.batch_size):
                batch = longest_first[start : start + self.batch_size]
                for (name, tokens), logits in zip(batch, self._logits(batch), strict=True):
                    for number, continuation in rows[name, tokens]:
                        found[name][number] = self._score(logits[: len(tokens)], continuation)
        return found

    def _logits(self, batch: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """[rows, tokens, columns] of rows that are padded on the right, which a causal model does not see."""
        longest = max(len(tokens) for _, tokens in batch)
        inputs = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for _, tokens in batch], device=self.device)
        return self.model(inputs, adapter_ids=[self.adapters[name] for name, _ in batch], use_cache=False).logits

    def _score(self, logits: torch.Tensor, continuation: Tokens) -> tuple[float, bool]:
        likely = torch.log_softmax(logits[-len(continuation) :], dim=-1, dtype=self.softmax_dtype)
        wanted = torch.tensor(continuation[-len(likely) :], device=likely.device)
        values = likely.gather(1, wanted[:, None])
        return float(values.sum()), bool((likely.argmax(-1) == wanted).all())

    def _groups(self) -> list[list[str]]:
        """Names that one forward can mix."""
        names = list(self.adapters)
        slots = max(1, self.model.multilora.config.max_loras - len(self.model.multilora.store.pinned()))
        return [names[i : i + slots] for i in range(0, len(names), slots)]

    def _answered(self, kind: str, requests: Sequence[Any], answer: Callable[[], Answers]) -> list[Any]:
        if self._asked is None:
            raise ModelError("MultiLoraLM holds several adapters: call its evaluate(tasks, ...), not simple_evaluate.")
        key, asked = (kind, self._turn), [request.args for request in requests]
        self._turn += 1
        if key not in self._ready:
            self._ready[key] = asked, answer()
        known, found = self._ready[key]
        if known != asked:
            raise ModelError(
                f"The harness asked other {kind} requests for {self._asked!r} than for the first adapter."
            )
        if len(self.adapters) == 1:  # nobody else will ask for the same
            del self._ready[key]
        return found[self._asked]


class _Context(str):
    """A prompt that knows whom it is for."""

    adapter: str

    def __new__(cls, text: str, adapter: str) -> _Context:
        found = super().__new__(cls, text)
        found.adapter = adapter
        return found


class _Request:
    """What the harness reads of a request that is to be answered in text."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args


class _Once:
    """A TaskManager that loads its tasks (data sets among them) once for all turns."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._loaded = manager, None

    def load(self, tasks: Any) -> Any:
        if self._loaded is None:
            self._loaded = self._manager.load(tasks)
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def _named(adapters: Any) -> dict[str, Any]:
    if isinstance(adapters, Mapping):
        named = dict(adapters)
    else:
        ids = [adapters] if isinstance(adapters, str) else list(adapters)
        names = [BASE if to_key(value, "adapters") is None else str(value) for value in ids]
        named = dict(zip(names, ids, strict=True))
        if len(named) != len(ids):
            raise ConfigError("adapters names one twice.")
    if not named:
        raise ConfigError("adapters is empty: name one at least, or None for the base.")
    return named

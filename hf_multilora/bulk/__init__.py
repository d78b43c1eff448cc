"""A file of prompts in, a file of answers out: `hf-multilora generate`. Needs the `demo` extra."""

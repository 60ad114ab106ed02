"""How many tokens a prompt of so many bytes is, learned per model from the usage in answers.

Admission needs a size before any tokenizer has seen the prompt. The exchange asks when a request arrives and reports
what the answer said. Clients choose model names, so only a bounded number of models is remembered.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

START_BYTES_PER_TOKEN = 4.0
SAMPLE_WEIGHT = 0.2
"""Share by which the ratio moves towards each sample (extproc.md, "What a request says")."""
MAX_MODELS = 256
MAX_MODEL_NAME_LENGTH = 512


class BytesPerToken:
    """The learned ratio of prompt bytes to prompt tokens of each model; above 0, 4.0 for a model not yet seen."""

    __slots__ = ("_max_models", "_ratios")

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._ratios: OrderedDict[str, float] = OrderedDict()

    def input_tokens(self, model: str, prompt_bytes: int) -> int:
        """Estimate the tokens of a prompt, rounded up."""
        if model in self._ratios:
            self._ratios.move_to_end(model)
        return math.ceil(prompt_bytes / self.ratio(model))

    def observe(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn from one answer; without bytes or tokens it teaches nothing.

        The model used least recently is forgotten when there are too many.
        """
        if prompt_bytes <= 0 or prompt_tokens <= 0 or len(model) > MAX_MODEL_NAME_LENGTH:
            return
        ratio = self.ratio(model)
        self._ratios[model] = ratio + SAMPLE_WEIGHT * (prompt_bytes / prompt_tokens - ratio)
        self._ratios.move_to_end(model)
        if len(self._ratios) > self._max_models:
            self._ratios.popitem(last=False)

    def ratio(self, model: str) -> float:
        """Bytes per token of a model."""
        return self._ratios.get(model, START_BYTES_PER_TOKEN)

    def ratios(self) -> Mapping[str, float]:
        """Bytes per token of every model remembered, as of now."""
        return dict(self._ratios)

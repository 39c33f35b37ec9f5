"""Our model behind lm-eval's interface: log-likelihoods, rolling log-likelihoods and generation.

Texts are encoded, cut and joined as in lm-eval's own class for models of transformers, so that both give equal numbers.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from moba_train.errors import UserError
from moba_train.model.transformer import Transformer
from moba_train.tools.chat.load import Template
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.generate import Sampling, generate_batch
from moba_train.tools.lm_eval.scoring import Continuation, score

logger = logging.getLogger(__name__)

_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}
"""Keys of generation_kwargs that we do not implement, with the value that changes nothing."""
_OF_SAMPLING = ("top_k", "min_p", "typical_p", "seed")
"""Keys that change nothing if the most likely token is taken."""


@dataclass(frozen=True)
class _Generation:
    """Rules for continuing a prompt, from a task's generation_kwargs."""

    sampling: Sampling
    max_new_tokens: int
    until: tuple[str, ...]
    """Texts that end the answer and are not part of it."""


class NativeLM(TemplateLM):  # type: ignore[misc, unused-ignore]  # untyped where the package is not installed
    """A model on one device, with its present attention.

    tokenizer: of transformers (tools/lm_eval/run.py)
    seq_len: tokens of the longest text that the model reads, answers included; longer ones lose their beginning
    in_full: log-likelihoods of answers with full attention, after a text that is read with the present one
    template: chat template; None if the tokenizer has none
    stop_tokens: token ids that end an answer, in addition to the tokenizer's end of a document
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Any,
        seq_len: int,
        *,
        batch_size: int = 8,
        batch_tokens: int = 32_768,
        decode: Decode = "full",
        in_full: bool = False,
        template: Template | None = None,
        stop_tokens: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.cut: Counter[str] = Counter()
        """Texts that lost their beginning, by task."""
        self._model = model
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._decode = decode
        self._in_full = in_full
        self._template = template
        self._stop_tokens = {token for token in (self.eot_token_id, *stop_tokens) if token is not None}

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return self._seq_len

    @property
    def eot_token_id(self) -> int | None:
        """Token that ends a document; None if the tokenizer has none."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the tokenizer's beginning of a text or, without one, its end."""
        first = self.tokenizer.bos_token_id
        if first is None:
            first = self.eot_token_id
        if first is None:
            raise UserError("the task scores texts without context, for which the tokenizer needs a bos or eos token")
        return int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: Any) -> list[int]:
        """Token ids of `string`, after the tokenizer's own mark unless `add_special_tokens` is False or it begins with
        one. Raises UserError for ids that the model does not have."""
        if add_special_tokens is None and (mark := self.tokenizer.bos_token) and string.startswith(mark):
            add_special_tokens = False
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        tokens: list[int] = self.tokenizer(string, verbose=False, **chosen).input_ids
        vocab_size = self._model.config.vocab_size
        if outside := [token for token in tokens if token >= vocab_size]:
            raise UserError(
                f"the tokenizer makes token id {outside[0]}, but model.vocab_size is {vocab_size}; give the tokenizer "
                "that the model was trained with"
            )
        return tokens

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_options: Any
    ) -> list[tuple[float, bool]]:
        continuations = [self._continuation(context, predicted) for _, context, predicted in requests]
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            scores = score(self._model, continuations, self._batch_tokens, bar.update, self._in_full)
        answers = [(found.log_likelihood, found.greedy) for found in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:  # lm-eval's cache of answers
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _continuation(self, context: Sequence[int], predicted: Sequence[int]) -> Continuation:
        if len(predicted) > self._seq_len:
            raise UserError(
                f"an answer to score has {len(predicted)} tokens, more than the {self._seq_len} that the model reads; "
                "give a longer --seq-len"
            )
        whole = [*context, *predicted]
        if len(whole) > self._seq_len + 1:
            self.cut["log-likelihoods"] += 1
        return Continuation(tuple(whole[-(self._seq_len + 1) : -1]), tuple(predicted))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of `max_length` tokens, each of which is predicted once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(tokens, self.prefix_token_id, self._seq_len, context_len=1)
            own = [(None, *make_disjoint_window(window)) for window in found]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuation of each prompt, up to the first text that ends it."""
        answers: dict[int, str] = {}
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        with tqdm(total=len(requests), desc="generation", disable=disable_tqdm) as bar:
            for wanted, indices in self._alike(requests).items():
                room = self._seq_len - wanted.max_new_tokens
                for index in indices:
                    self.cut[str(requests[index].task_name)] += len(prompts[index]) > room
                order = sorted(indices, key=lambda index: -len(prompts[index]))
                for first in range(0, len(order), self._batch_size):
                    batch = order[first : first + self._batch_size]
                    texts = self._continue([prompts[index][-room:] for index in batch], wanted, first)
                    answers |= dict(zip(batch, texts, strict=True))
                    bar.update(len(batch))
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _alike(self, requests: Sequence[Instance]) -> dict[_Generation, list[int]]:
        """Indices of the requests by the rules for continuing them."""
        found: dict[_Generation, list[int]] = {}
        known: dict[str, _Generation] = {}
        for index, request in enumerate(requests):
            options = json.dumps(request.args[1], sort_keys=True, default=str)
            if options not in known:
                known[options] = self._generation(request.args[1], str(request.task_name))
            found.setdefault(known[options], []).append(index)
        return found

    def _generation(self, options: dict[str, Any], task: str) -> _Generation:
        """Rules in a task's generation_kwargs, with lm-eval's defaults. Raises UserError for those that we cannot
        follow."""
        given = normalize_gen_kwargs(options)
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = handle_stop_sequences(given.pop("until"), eos)
        max_new_tokens = given.pop("max_gen_toks")
        temperature = float(given.pop("temperature", 0.0))
        if not given.pop("do_sample"):
            temperature = 0.0
        top_p = float(given.pop("top_p", 1.0))
        ignored = () if temperature else _OF_SAMPLING
        refused = {key: value for key, value in given.items() if key not in ignored and _NEUTRAL.get(key) != value}
        if refused:
            values = ", ".join(f"{key}: {value!r}" for key, value in refused.items())
            raise UserError(
                f"task {task}: its generation_kwargs have {values}; moba-train lm-eval knows until, max_gen_toks, "
                "do_sample, temperature and top_p"
            )
        if max_new_tokens >= self._seq_len:
            raise UserError(
                f"task {task}: answers of {max_new_tokens} tokens leave no room for a prompt in the {self._seq_len} "
                "that the model reads; give a longer --seq-len"
            )
        sampling = Sampling(temperature, top_p if temperature else 1.0)
        return _Generation(sampling, max_new_tokens, tuple(text for text in until if text))

    def _continue(self, prompts: Sequence[list[int]], wanted: _Generation, first: int) -> Iterator[str]:
        """Yield the text that continues each prompt. `first` is the number of prompts of equal requests before these,
        so that equal prompts get different samples for every batch size."""
        answers: list[list[int]] = [[] for _ in prompts]
        sampling = Sampling(wanted.sampling.temperature, wanted.sampling.top_p, wanted.sampling.seed + first)
        steps = generate_batch(
            self._model,
            prompts,
            wanted.max_new_tokens,
            sampling,
            stop_tokens=self._stop_tokens,
            decode=self._decode,
            ended=self._ended(answers, wanted.until),
        )
        try:
            for step in steps:
                for index, token in step.items():
                    answers[index].append(token)
        except ValueError as error:
            raise UserError(str(error)) from error
        for tokens in answers:
            text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
            for end in wanted.until:
                text = text.split(end)[0]
            yield text

    def _ended(self, answers: Sequence[list[int]], until: Sequence[str]) -> Callable[[int], bool]:
        """Function that is asked after each token of an answer, and returns True if it contains a text that ends it."""
        # Each token has a byte at least; the first ones may be parts of characters.
        longest = max((len(text.encode()) for text in until), default=0) + 4

        def ended(index: int) -> bool:
            text = self.tokenizer.decode(answers[index][-longest:], skip_special_tokens=True)
            return any(end in text for end in until)

        return ended

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Without a generation prompt, its last message stays open, to be continued."""
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt)
        except ValueError as error:
            raise UserError(f"--apply-chat-template: {error}") from error
        if add_generation_prompt or not chat_history:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)] if last in text else text

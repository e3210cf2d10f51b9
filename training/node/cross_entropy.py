"""Cross-entropy of a head's logits by chunks: full logits never exist, and the gradient is made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from training.data.sample import IGNORED


@dataclass(frozen=True)
class Logits:
    """What a model makes of its head's products, in fp32."""

    scale: float = 1.0
    """Cohere (logit_scale), Falcon H1 (lm_head_multiplier), Granite and MiniCPM3 (1 / logits_scaling)."""
    cap: float | None = None
    """Gemma 2 to 4 (final_logit_softcapping): products z become cap tanh(z / cap), arXiv 2408.00118."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Logits:
        """As a model's configuration says, or that of its text."""
        own = config.get_text_config(decoder=True)
        scale = getattr(own, "logit_scale", None) or 1.0
        scale *= getattr(own, "lm_head_multiplier", None) or 1.0
        scale /= getattr(own, "logits_scaling", None) or 1.0
        return cls(scale, getattr(own, "final_logit_softcapping", None))

    @property
    def plain(self) -> bool:
        return self == Logits()

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Of fp32 products; in place where nobody asks for their gradient."""
        if self.plain:
            return products
        if torch.is_grad_enabled() and products.requires_grad:
            scaled = products * self.scale
            return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)
        products.mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Of logits by products, at the logits."""
        return self.scale if self.cap is None else (1 - (logits / self.cap).square_()).mul_(self.scale)

    def rows(self, chunk: int) -> int:
        """How many rows at once take the memory of `chunk` plain ones: a cap's slope lies beside the logits."""
        return chunk if self.cap is None else max(1, chunk // 2)


PLAIN = Logits()


class Chunked(NamedTuple):
    """How a head's logits are made: some rows at once, whose memory becomes their gradient where one is asked for."""

    logits: Logits
    rows: int
    learning: bool
    """Whether one is: inside a torch.autograd.Function nothing tells."""

    @classmethod
    def of(cls, logits: Logits, chunk: int) -> Chunked:
        return cls(logits, logits.rows(chunk), torch.is_grad_enabled())


def own_cross_entropy(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk: int,
    logits: Logits = PLAIN,
) -> torch.Tensor:
    """The same without Liger's kernels."""
    loss, correct = _LinearCrossEntropy.apply(hidden, weight, bias, targets, Chunked.of(logits, chunk))
    return torch.stack((loss, correct))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        made: Chunked,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [made.learning and ctx.needs_input_grad[i] for i in range(3)]
        grads = [
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None,
        ]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(loss)
        chunk = made.rows
        for start in range(0, len(hidden), chunk):
            rows, answers = hidden[start : start + chunk], targets[start : start + chunk]
            logits = made.logits(fp32_logits(rows, weight, bias))
            slots = answers.clamp(min=0).unsqueeze(1)
            learned = (answers != IGNORED).float()
            correct += ((logits.argmax(1) == answers) * learned).sum()
            normaliser = logits.logsumexp(1)
            loss += ((normaliser - logits.gather(1, slots).squeeze(1)) * learned).sum()
            if any(wanted):
                # The logits' memory becomes their gradient: softmax minus one at the target.
                inner = None if made.logits.plain else made.logits.slope(logits)
                slope = logits.sub_(normaliser.unsqueeze(1)).exp_()
                slope.scatter_add_(1, slots, torch.full_like(slots, -1, dtype=slope.dtype)).mul_(learned.unsqueeze(1))
                if inner is not None:
                    slope.mul_(inner)
                    del inner
                if grads[2] is not None:
                    grads[2] += slope.sum(0)
                narrow = slope.to(weight.dtype)
                del slope
                if grads[0] is not None:
                    torch.mm(narrow, weight, out=grads[0][start : start + chunk])
                if grads[1] is not None:
                    grads[1] += narrow.T @ rows
                del narrow
            del logits  # each of them would lie beside the next chunk's
        ctx.save_for_backward(*grads)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)


def fp32_logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A head's products."""
    if rows.is_cuda and rows.dtype != torch.float32:  # straight out of the fp32 accumulator, never rounded
        logits = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        logits = (rows @ weight.T).float()
    return logits if bias is None else logits + bias.float()

"""fp16's loss scale: as large a factor as does not overflow, so that small gradients do not vanish.

Halved by each overflow, doubled after a thousand steps without one. The same whether our own class counts or
DeepSpeed's (read in deepspeed 0.19.8), so that a run may be resumed by another strategy.
"""

from __future__ import annotations

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase

from training.node.strategies import OptimizerProgress

FIRST_POWER = 16
LOWEST = 1.0
"""An overflow at this scale is the run's own: another step would overflow again."""
WINDOW = 1000
FP16 = {
    "enabled": True,
    "initial_scale_power": FIRST_POWER,
    "loss_scale_window": WINDOW,
    "hysteresis": 1,  # DeepSpeed's own 2 forgives the first overflow
    "min_loss_scale": LOWEST,
}
"""DeepSpeed's settings for it."""


class LossScale:
    """For a strategy that scales by itself; always 1 where it is not enabled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**FIRST_POWER if enabled else 1.0
        self._good_steps = 0

    def overflowed(self, norm: float) -> bool:
        """Whether to skip this step and try a smaller scale, which is set for the next one."""
        if not self.enabled:
            return False
        finite = norm < float("inf")
        may_fall = self.value > LOWEST
        if not finite:
            self.value = max(LOWEST, self.value / 2)
        elif self._good_steps and self._good_steps % WINDOW == 0:
            self.value *= 2
        self._good_steps = self._good_steps + 1 if finite else 0
        return not finite and may_fall

    def optimizer_progress(self, updates: int) -> OptimizerProgress:
        return OptimizerProgress(updates, self.value, self._good_steps) if self.enabled else OptimizerProgress(updates)

    def restore(self, progress: OptimizerProgress) -> None:
        if self.enabled and progress.loss_scale is not None:
            self.value, self._good_steps = progress.loss_scale, progress.good_steps


def may_fall(scaler: LossScalerBase | None) -> bool:
    """Whether an overflow with DeepSpeed's may be cured by a smaller scale. In bf16 and fp32 there is none, and
    DeepSpeed leaves steps out for a gradient that is not finite all the same."""
    return isinstance(scaler, DynamicLossScaler) and float(scaler.cur_scale) > LOWEST


def optimizer_progress_of(scaler: LossScalerBase | None, updates: int) -> OptimizerProgress:
    """The same of DeepSpeed's."""
    if not isinstance(scaler, DynamicLossScaler):
        return OptimizerProgress(updates)
    return OptimizerProgress(updates, float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1)


def restore_into(scaler: LossScalerBase | None, progress: OptimizerProgress) -> None:
    """Set DeepSpeed's."""
    if isinstance(scaler, DynamicLossScaler) and progress.loss_scale is not None:
        scaler.cur_scale = progress.loss_scale
        scaler.cur_iter = scaler.last_overflow_iter + 1 + progress.good_steps

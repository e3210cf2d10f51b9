"""fp16's loss scale: as large a factor as does not overflow, so that small gradients do not vanish.

Halved by each overflow, doubled after a thousand steps without one. The same whether our own class counts or
DeepSpeed's (read in deepspeed 0.19.8), so that a run may be resumed by another strategy.
"""

from __future__ import annotations

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase

from training.strategies import Behind

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
        self._calm = 0

    def overflowed(self, norm: float) -> bool:
        """Whether to skip this step and try a smaller scale, which is set for the next one."""
        if not self.enabled:
            return False
        finite = norm < float("inf")
        may_fall = self.value > LOWEST
        if not finite:
            self.value = max(LOWEST, self.value / 2)
        elif self._calm and self._calm % WINDOW == 0:
            self.value *= 2
        self._calm = self._calm + 1 if finite else 0
        return not finite and may_fall

    def behind(self, updates: int) -> Behind:
        return Behind(updates, self.value, self._calm) if self.enabled else Behind(updates)

    def restore(self, behind: Behind) -> None:
        if self.enabled and behind.loss_scale is not None:
            self.value, self._calm = behind.loss_scale, behind.calm


def may_fall(scaler: LossScalerBase | None) -> bool:
    """Whether an overflow with DeepSpeed's may be cured by a smaller scale. In bf16 and fp32 there is none, and
    DeepSpeed leaves steps out for a gradient that is not finite all the same."""
    return isinstance(scaler, DynamicLossScaler) and float(scaler.cur_scale) > LOWEST


def behind_of(scaler: LossScalerBase | None, updates: int) -> Behind:
    """The same of DeepSpeed's."""
    if not isinstance(scaler, DynamicLossScaler):
        return Behind(updates)
    return Behind(updates, float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1)


def restore_into(scaler: LossScalerBase | None, behind: Behind) -> None:
    """Set DeepSpeed's."""
    if isinstance(scaler, DynamicLossScaler) and behind.loss_scale is not None:
        scaler.cur_scale = behind.loss_scale
        scaler.cur_iter = scaler.last_overflow_iter + 1 + behind.calm

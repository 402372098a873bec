"""lohan-cap: LoHan with Capuchin's decisions (LoHan Fig. 9a "+Cap"; mechanisms a2); states and optimizer are LoHan's."""

from __future__ import annotations

from lohan_fx.policies.capuchin import ACTIVATIONS, by_link_cost
from lohan_fx.policies.layout import STREAMED
from lohan_fx.policies.lohan import LOHAN

LOHAN_CAP = STREAMED.policy("lohan-cap", "LoHan", ACTIVATIONS, by_link_cost, formulas=LOHAN.formulas)

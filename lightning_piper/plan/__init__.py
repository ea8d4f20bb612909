"""Training DAG -> one plan per device: a flat list of instructions in which everything is decided.

plans = compile_plans(dag)          # mapping: logical device -> Plan; made when they are asked for
check_plans(plans.representatives, plans.image)     # raises VerificationError; check_plans(plans) checks those of all devices
print(plans[0])                     # one line an instruction
"""

from lightning_piper.plan.check import check_plans
from lightning_piper.plan.compile import Plans, compile_plans
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan

__all__ = ["Plan", "Plans", "check_plans", "compile_plans", "global_order"]

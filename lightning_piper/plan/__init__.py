"""Training DAG -> one plan per device: a flat list of instructions in which everything is decided.

plans = compile_plans(dag)          # dict: logical device -> Plan; every process compiles all of them
check_plans(plans)                  # raises VerificationError
print(plans[0])                     # one line an instruction
"""

from lightning_piper.plan.check import check_plans
from lightning_piper.plan.compile import compile_plans
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan

__all__ = ["Plan", "check_plans", "compile_plans", "global_order"]

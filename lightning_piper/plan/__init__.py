"""Training DAG -> one plan per device: a flat list of instructions in which everything is decided.

eliminate(dag)                      # communication that the order of the finished DAG makes redundant
plans = compile_plans(dag)          # dict: logical device -> Plan; every process compiles all of them
check_plans(plans)                  # raises VerificationError
print(plans[0])                     # one line an instruction
"""

from lightning_piper.plan.check import check_plans
from lightning_piper.plan.compile import compile_plans, eliminate
from lightning_piper.plan.gathers import drop_redundant
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan

__all__ = ["Plan", "check_plans", "compile_plans", "drop_redundant", "eliminate", "global_order"]

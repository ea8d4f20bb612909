"""Compile a training DAG to one plan per device: a flat list of instructions that leaves no decision open.

An example::

    plans = compile_plans(dag)                       # mapping: logical device -> Plan, made on first access
    check_plans(plans.representatives, plans.image)  # raises VerificationError
    check_plans(plans)                               # the same check of all devices
    print(plans[0])                                  # one line for each instruction
"""

from lightning_piper.plan.checks.plan_check import check_plans
from lightning_piper.plan.compilation import Plans, compile_plans
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan

__all__ = ["Plan", "Plans", "check_plans", "compile_plans", "global_order"]

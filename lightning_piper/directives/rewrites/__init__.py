"""Rewrites of the training DAG that several directives share, one idea in each file.

A directive calls them in `apply`. They do not know directives, but for `base.Directive`, which raises their errors.
"""

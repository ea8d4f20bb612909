"""The input of a search: a `Workload`, with the blocks of a model and the time and memory that each block
takes.

`blocks` finds the blocks. A workload comes from a calculation (`analytic_costs`), from a measurement
(`measurement`), or from a recorded run (`recorded_costs`).
"""

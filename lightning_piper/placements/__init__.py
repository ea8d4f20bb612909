"""Placements of all values of a joint graph along an axis, inferred from the placements of its parameters.

An example::

    rules = rules_for(node, degree)              # placements an operation can read and make
    rule = choose(node, held, ...)               # the rule that needs the cheapest changes of placement
    proof.prove(node, rule, degree)              # proof by execution: shards against the whole
    localize(graph, held, degree)                # the graph as one member runs it

For example, `mm` of S(1) and S(0) makes P(sum). The placements are those in `ir.values`. All of this works on
the whole graph, forward and backward at once.
"""

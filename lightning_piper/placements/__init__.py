"""What members of an axis hold of every value of a joint graph, as it follows from what they hold of its parameters.

    rules = rules_for(node)                  # what an operation may read and make: `mm` of S(1) and S(0) is P(sum)
    proof.prove(node, rule, degree)          # the same by execution: parts against the whole
    divided = divide(graph, division, ...)   # every value gets a placement; changes of placement are nodes of their own
    localize(graph, degree)                  # the graph as one member runs it

Placements are those of `ir.values`; the work is done on the whole graph, forward and backward at once.
"""

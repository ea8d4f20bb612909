"""Pictures: a simulated step as an SVG chart or as text, and the DAG of a device for Graphviz. An example::

    Path("step.svg").write_text(svg_chart(simulation))
    print(text_chart(simulation))
    print(dot_graph(compiled.dag, device=0))

Here, `compiled` comes from `lightning_piper.compile`, and `simulation` from `simulate`.
"""

from lightning_piper.viz.dot import dot_graph
from lightning_piper.viz.svg import svg_chart
from lightning_piper.viz.text import text_chart

__all__ = ["dot_graph", "svg_chart", "text_chart"]

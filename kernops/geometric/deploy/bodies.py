"""Bodies of the node ``kernops::BevPool``, with which any ONNX runtime runs it.

A body is a *function* of the ONNX model, the same for all its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .node import DOMAIN, OP, import_package

#: The oldest opset that has all that a body is made of (ScatterND that adds).
MIN_OPSET = 16
#: Ends the name of the constant 1 that stands for an omitted weight, in models where other nodes have a weight.
NO_WEIGHT = "_no_weight"

#: One depth after the other is added to the sums, so that no more than one (B, N, h, w, C) product exists at a time.
#: Sums have an additional first row, which takes what is dropped: a cell beyond the grid is then an error of ScatterND.
_BODY = """
<opset_import: ["" : {opset}], domain: "{domain}">
{op} <shape, depth_logits> (depth, feat, cells{weight_input}) => (pooled)
{{
  start = Constant <value = int64[1] {{0}}> ()
  one = Constant <value = int64[1] {{1}}> ()
  all = Constant <value = int64[1] {{-1}}> ()
  given = Constant <value_ints : ints = @shape> ()
  open = Less (given, start)
  batch = Shape <start = 0, end = 1> (depth)
  grid = Where (open, batch, given)
  n_cells = ReduceProd <keepdims = 1> (grid)
  n_rows = Add (n_cells, one)
  channels = Shape <start = 4> (feat)
  sums_shape = Concat <axis = 0> (n_rows, channels)
  rows_shape = Concat <axis = 0> (all, channels)
  index_shape = Concat <axis = 0> (all, one)
  cells_64 = Cast <to = 7> (cells)
  marked = Max (cells_64, all)
  target = Add (marked, one)
  values = Cast <to = {dtype}> (feat)
  scores = Cast <to = {dtype}> (depth)
  logits = Constant <value_int : int = @depth_logits> ()
  are_logits = Cast <to = 9> (logits)
  shares = If (are_logits) <
    then_branch = softmax () => (of_logits) {{ of_logits = Softmax <axis = 2> (scores) }},
    else_branch = as_given () => (of_shares) {{ of_shares = Identity (scores) }}
  >
  {weights}
  zeros = ConstantOfShape <value = {zero}[1] {{0}}> (sums_shape)
  depths = Shape <start = 2, end = 3> (cells)
  n_depths = Squeeze (depths)
  yes = Constant <value = bool {{1}}> ()
  sums = Loop (n_depths, yes, zeros) <body = one_depth (int64 k, bool go, so_far) => (bool go_on, added) {{
    go_on = Identity (go)
    last = Constant <value = int64[1] {{-1}}> ()
    weights_k = Gather <axis = 2> (weights, k)
    column = Unsqueeze (weights_k, last)
    products = Mul (column, values)
    rows = Reshape (products, rows_shape)
    target_k = Gather <axis = 2> (target, k)
    index = Reshape (target_k, index_shape)
    added = ScatterND <reduction = "add"> (so_far, index, rows)
  }}>
  kept = Slice (sums, one, n_rows, start)
  pooled_shape = Concat <axis = 0> (grid, channels)
  exact = Reshape (kept, pooled_shape)
  pooled = CastLike (exact, feat)
}}
"""


def with_functions(model: Any) -> Any:
    """A copy of an ONNX model in which every node ``kernops::BevPool`` has a body that onnxruntime runs.

    A body computes in float32 and gives the dtype of ``feat``; it computes in float64 where the ``depth`` of a node is
    of float64, or where the model does not say. Where only some of the nodes have a weight, the others
    get the constant 1 as theirs; :func:`strip_functions` takes it away again.

    Args:
        model: an ``onnx.ModelProto`` or an ``onnx_ir.Model``. Bodies that are there already are replaced.

    Returns:
        The copy, of the same type.

    Raises:
        ImportError: onnx or onnx_ir is not installed.
        TypeError: ``model`` is of another type.
        ValueError: the opset of the model is below 16, or a node is not as this module says.

    Example:
        >>> import onnx
        >>> bare = onnx.parser.parse_model(
        ...     '<ir_version: 10, opset_import: ["" : 20, "kernops" : 1]> '
        ...     "pool (float[1,1,2,1,1] depth, float[1,1,1,1,3] feat, int32[1,1,2,1,1] cells) "
        ...     "=> (float[1,1,2,2,3] bev) "
        ...     "{ bev = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 0> (depth, feat, cells) }"
        ... )
        >>> [f.name for f in with_functions(bare).functions]
        ['BevPool']
    """
    return _changed(model, attach)


def strip_functions(model: Any) -> Any:
    """A copy of an ONNX model whose nodes ``kernops::BevPool`` have no body: for engines that bring a plugin.

    Args:
        model: an ``onnx.ModelProto`` or an ``onnx_ir.Model``.

    Returns:
        The copy, of the same type. :func:`with_functions` gives the bodies back.

    Raises:
        ImportError: onnx or onnx_ir is not installed.
        TypeError: ``model`` is of another type.

    Example:
        >>> import onnx
        >>> bare = onnx.parser.parse_model(
        ...     '<ir_version: 10, opset_import: ["" : 20, "kernops" : 1]> '
        ...     "pool (float[1,1,2,1,1] depth, float[1,1,1,1,3] feat, int32[1,1,2,1,1] cells) "
        ...     "=> (float[1,1,2,2,3] bev) "
        ...     "{ bev = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 0> (depth, feat, cells) }"
        ... )
        >>> strip_functions(with_functions(bare)) == bare
        True
    """
    return _changed(model, _detach)


def _changed(model: Any, change: Callable[[Any], None]) -> Any:
    """A changed copy of a model of either type."""
    onnx, ir = import_package("onnx"), import_package("onnx_ir")
    if isinstance(model, onnx.ModelProto):
        copy = ir.serde.deserialize_model(model)
        change(copy)
        return ir.serde.serialize_model(copy)
    if isinstance(model, ir.Model):
        copy = model.clone()
        change(copy)
        return copy
    raise TypeError(f"model must be an onnx.ModelProto or an onnx_ir.Model; got {type(model).__name__}")


def attach(model: Any) -> None:
    """Give the nodes of an ``onnx_ir.Model`` their body, in place."""
    _detach(model)
    nodes = list(_nodes(model))
    for node in nodes:
        _check(node)
    weighted = any(_weight(node) is not None for node in nodes)
    if weighted:
        for node in nodes:
            if _weight(node) is None:
                _add_no_weight(node)
    if nodes:
        # A dtype is None where the model does not say.
        double = any(node.inputs[0].dtype is None or node.inputs[0].dtype.name == "DOUBLE" for node in nodes)
        body = _body(weighted, double, model.opset_imports.get("", 0))
        model.functions[body.identifier()] = body


def _detach(model: Any) -> None:
    """Take the body away from the nodes of an ``onnx_ir.Model``, in place."""
    for domain, name, overload in list(model.functions):
        if (domain, name) == (DOMAIN, OP):
            del model.functions[domain, name, overload]
    for node in list(_nodes(model)):
        weight = _weight(node)
        if weight is not None and weight.name.endswith(NO_WEIGHT) and weight.producer() is not None:
            node.replace_input_with(3, None)
            weight.producer().graph.remove(weight.producer())
        if _weight(node) is None:
            node.resize_inputs(min(len(node.inputs), 3))  # an omitted input may be there without a name


def _nodes(model: Any) -> Iterator[Any]:
    """All BevPool nodes of a model: of its graph, its functions, and of their branches and loops."""
    for graph in (model.graph, *model.functions.values()):
        yield from (node for node in graph.all_nodes() if (node.domain, node.op_type) == (DOMAIN, OP))


def _check(node: Any) -> None:
    inputs = list(node.inputs)
    if not 3 <= len(inputs) <= 4 or None in inputs[:3] or not {"shape", "depth_logits"} <= set(node.attributes):
        raise ValueError(
            f"node {node.name!r}: {DOMAIN}::{OP} has inputs depth, feat, cells and optionally weight, and attributes "
            f"shape and depth_logits; got {len(inputs)} inputs and attributes {sorted(node.attributes)}"
        )


def _weight(node: Any) -> Any:
    return node.inputs[3] if len(node.inputs) > 3 else None


def _add_no_weight(node: Any) -> None:
    """Weigh every point with 1: a body has the same inputs for all nodes."""
    ir = import_package("onnx_ir")
    one = ir.node("Constant", [], attributes={"value": ir.tensor([1.0], dtype=ir.DataType.FLOAT)})
    one.outputs[0].name = f"{node.outputs[0].name}{NO_WEIGHT}"
    node.graph.insert_before(node, one)
    node.resize_inputs(4)
    node.replace_input_with(3, one.outputs[0])


def _body(weighted: bool, double: bool, opset: int) -> Any:
    """The body, as an ``onnx_ir.Function``; ``double``: it computes in float64, not in float32."""
    if opset < MIN_OPSET:
        raise ValueError(f"the model is of opset {opset}; a body of {DOMAIN}::{OP} needs opset {MIN_OPSET} or newer")
    onnx, ir = import_package("onnx"), import_package("onnx_ir")
    zero = "double" if double else "float"
    dtype = onnx.TensorProto.DataType.Value(zero.upper())
    factors = f"factors = Cast <to = {dtype}> (weight)\n  weights = Mul (shares, factors)"
    text = _BODY.format(
        opset=opset,
        domain=DOMAIN,
        op=OP,
        weight_input=", weight" if weighted else "",
        weights=factors if weighted else "weights = Identity (shares)",
        dtype=dtype,
        zero=zero,
    )
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))

"""ONNX: the splat as one node ``kernops::BevPool``, with or without a body that any ONNX runtime can run.

The node, of domain ``kernops`` and version 1:

==============  ========================================================================================================
inputs          ``depth`` (B, N, D, h, w), ``feat`` (B, N, h, w, C), ``cells`` (B, N, D, h, w) of int32 or int64 with -1
                where a point is dropped, and optionally ``weight`` (B, N, D, h, w). All but ``cells`` are of one dtype.
output          ``pooled`` (B, Z, Y, X, C), of the dtype of ``feat``
``shape``       ints (B, Z, Y, X); -1 in the place of B stands for the B of ``depth``
``depth_logits``  int; 1: ``depth`` are logits, and their softmax over D is what counts
==============  ========================================================================================================

The body is a *function* of the ONNX model, the same for all its nodes.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

DOMAIN, OP, VERSION = "kernops", "BevPool", 1
#: The oldest opset that has all that a body is made of (ScatterND that adds).
MIN_OPSET = 16
#: Ends the name of the constant 1 that stands for an omitted weight, in models where other nodes have a weight.
NO_WEIGHT = "_no_weight"
#: What makes an installation complete, in the words of error messages.
INSTALL = 'pip install "kernops[onnx]"'
#: Options of ``torch.onnx.export`` that have another name here.
RENAMED = {"opset_version": "opset", "f": "path"}


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


# --- exporting --------------------------------------------------------------------------------------------------------
def export_onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    functions: bool = True,
    **options: Any,
) -> Any:
    """Export a model that uses :func:`kernops.geometric.splat` to ONNX.

    Each splat becomes one node ``kernops::BevPool``, whatever the variant and the back end of its plan. The plan's
    cells go into the file as a constant; where the model gets them as an input (``torch.ops.kernops.bev_pool``), the
    numbers of samples, depths, rows and columns can be dynamic. :func:`kernops.geometric.splat_features` and the sums
    by bucket cannot be exported.

    Args:
        model: the model, in evaluation mode.
        args: its inputs, as an example.
        path: the file to write; None writes none.
        dynamic_shapes: as in ``torch.onnx.export``.
        opset: version of the ONNX operators, at least 18; None takes torch's default.
        input_names, output_names: names in the file.
        functions: whether nodes get their bodies (:func:`with_functions`), so that onnxruntime runs the file.
        **options: anything else that ``torch.onnx.export`` takes. Entries of a ``custom_translation_table`` are added;
            ``dynamo`` can only be True.

    Returns:
        The ``torch.onnx.ONNXProgram``.

    Raises:
        ImportError: onnx, onnxscript or onnx_ir is not installed; ``pip install "kernops[onnx]"`` installs them.
        TypeError: ``opset`` is not an integer, or an option has another name here.
        ValueError: ``opset`` is too old, ``dynamo`` is not True, or the model calls another operator of kernops.

    Example:
        >>> import torch
        >>> from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig, splat
        >>> rig = nuscenes_rig().resized((256, 704))
        >>> grid = BEVGrid((-48.0, 48.0, 4.0), (-48.0, 48.0, 4.0), (-5.0, 3.0, 8.0))
        >>> plan = SplatPlan(rig, frustum((256, 704), (8, 22), (1.0, 60.0, 4.0)), grid)
        >>> class Pool(torch.nn.Module):
        ...     def forward(self, depth, feat):
        ...         return splat(depth, feat, plan)
        >>> program = export_onnx(Pool().eval(), (torch.rand(1, 6, 15, 8, 22), torch.rand(1, 6, 8, 22, 4)))
        >>> [node.op_type for node in program.model.graph]
        ['BevPool', 'Transpose']
    """
    _import("onnxscript")
    _check_options(opset, options)
    table = {
        torch.ops.kernops.bev_pool.default: _translation(),
        **(options.pop("custom_translation_table", None) or {}),
    }
    options = {"verbose": False, **options, "input_names": input_names, "output_names": output_names, "dynamo": True}
    try:
        program = torch.onnx.export(
            model,
            args,
            dynamic_shapes=dynamic_shapes,
            opset_version=opset,
            custom_translation_table=table,
            **options,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        name = _untranslated(error)
        if name is None:
            raise
        raise ValueError(
            f"of the operators of kernops.geometric, splat alone can be exported to ONNX; the model calls {name} "
            "(splat_features and bucketed_sum do)"
        ) from error
    assert program is not None
    if functions:
        _attach(program.model)
    if path is not None:
        program.save(path)
    return program


def _check_options(opset: object, options: dict[str, Any]) -> None:
    if opset is not None and not isinstance(opset, int):
        raise TypeError(f"opset must be an integer or None; got {opset!r}")
    if opset is not None and opset < 18:
        raise ValueError(f"opset must be at least 18, the oldest that torch.onnx.export writes; got {opset}")
    if options.get("dynamo", True) is not True:
        raise ValueError(f"dynamo must be True: the older exporter cannot write a splat; got {options['dynamo']!r}")
    for name in sorted(RENAMED.keys() & options.keys()):
        raise TypeError(f"{name} is called {RENAMED[name]} here; got {name}={options[name]!r}")


def _untranslated(error: BaseException | None) -> str | None:
    """The operator of kernops that the exporter has no translation for, if that is why it failed."""
    while error is not None:
        found = re.search(r"No ONNX function found for <OpOverload\(op='(kernops\.\w+)'", str(error))
        if found:
            return f"torch.ops.{found[1]}"
        error = error.__cause__
    return None


@lru_cache(maxsize=1)
def _translation() -> Callable[..., Any]:
    """What the exporter writes for ``torch.ops.kernops.bev_pool``: the bare node."""
    from onnx.defs import OpSchema
    from onnxscript import values

    optional = OpSchema.FormalParameterOption.Optional
    kinds = [
        ("T", [f"tensor({name})" for name in ("float16", "bfloat16", "float", "double")], "floating-point numbers"),
        ("I", ["tensor(int32)", "tensor(int64)"], "cells"),
    ]
    inputs = [OpSchema.FormalParameter(name, kind) for name, kind in (("depth", "T"), ("feat", "T"), ("cells", "I"))]
    schema = OpSchema(
        OP,
        DOMAIN,
        VERSION,
        doc="Sums of depth * feat (* weight) over the points of each cell.",
        inputs=[*inputs, OpSchema.FormalParameter("weight", "T", param_option=optional)],
        outputs=[OpSchema.FormalParameter("pooled", "T")],
        type_constraints=kinds,
        attributes=[
            OpSchema.Attribute("shape", OpSchema.AttrType.INTS),
            OpSchema.Attribute("depth_logits", OpSchema.AttrType.INT),
        ],
    )
    node = values.Op(values.Opset(DOMAIN, VERSION), OP, schema)

    def bev_pool(depth, feat, weight, cells, levels, shape, variant, backend, depth_logits):  # type: ignore[no-untyped-def]
        inputs = (depth, feat, cells) if weight is None else (depth, feat, cells, weight)
        return node(*inputs, shape=_static(shape), depth_logits=int(depth_logits))

    return bev_pool


def _static(shape: Sequence[Any]) -> list[int]:
    """The attribute ``shape``, with -1 for a dynamic number of samples."""
    batch, *grid = shape
    if not all(isinstance(size, int) for size in grid):
        raise ValueError(f"the grid (Z, Y, X) of a splat must be fixed in an ONNX model; got {tuple(map(str, grid))}")
    return [batch if isinstance(batch, int) else -1, *grid]


# --- bodies -----------------------------------------------------------------------------------------------------------
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
    return _changed(model, _attach)


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
    onnx, ir = _import("onnx"), _import("onnx_ir")
    if isinstance(model, onnx.ModelProto):
        copy = ir.serde.deserialize_model(model)
        change(copy)
        return ir.serde.serialize_model(copy)
    if isinstance(model, ir.Model):
        copy = model.clone()
        change(copy)
        return copy
    raise TypeError(f"model must be an onnx.ModelProto or an onnx_ir.Model; got {type(model).__name__}")


def _attach(model: Any) -> None:
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
    ir = _import("onnx_ir")
    one = ir.node("Constant", [], attributes={"value": ir.tensor([1.0], dtype=ir.DataType.FLOAT)})
    one.outputs[0].name = f"{node.outputs[0].name}{NO_WEIGHT}"
    node.graph.insert_before(node, one)
    node.resize_inputs(4)
    node.replace_input_with(3, one.outputs[0])


def _body(weighted: bool, double: bool, opset: int) -> Any:
    """The body, as an ``onnx_ir.Function``; ``double``: it computes in float64, not in float32."""
    if opset < MIN_OPSET:
        raise ValueError(f"the model is of opset {opset}; a body of {DOMAIN}::{OP} needs opset {MIN_OPSET} or newer")
    onnx, ir = _import("onnx"), _import("onnx_ir")
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


def _import(name: str) -> Any:
    """A module of the ``onnx`` extra, with what its users need of it."""
    try:
        module = importlib.import_module(name)
        if name == "onnx":
            importlib.import_module("onnx.parser")
    except ImportError as error:
        raise ImportError(f"ONNX export needs the package {name!r}, which cannot be imported: {INSTALL}") from error
    return module

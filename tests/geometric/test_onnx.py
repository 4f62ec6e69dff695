"""ONNX files with the splat in them: what onnxruntime computes, against torch and against the definition in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernops.geometric import SplatPlan, splat, splat_features
from kernops.geometric.deploy import export_onnx, strip_functions, with_functions

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [  # of torch's exporter
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*axis name.*:UserWarning"),
]

Tensor = torch.Tensor
POINTS, CHANNELS, SHAPE = (2, 3, 4, 2, 3), 5, (2, 2, 4, 3)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def tiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_cells(points: tuple[int, ...] = POINTS, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    """Cells of each sample, some points dropped."""
    each = shape[1] * shape[2] * shape[3]
    rng = np.random.default_rng(seed)
    cells = rng.integers(-each // 2, each, points)
    first = np.arange(points[0]).reshape(-1, 1, 1, 1, 1) * each
    return torch.from_numpy(np.where(cells < 0, -1, cells + first)).int()


def make_inputs(dtype: torch.dtype = torch.float32, points: tuple[int, ...] = POINTS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    b, n, _, h, w = points
    return torch.rand(points).to(dtype), torch.rand(b, n, h, w, CHANNELS).to(dtype)


def dense(depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, shape: Any, logits: bool) -> Tensor:
    """The definition: the built frustum tensor, added up cell by cell in float64."""
    share = depth.double().softmax(2) if logits else depth.double()
    if weight is not None:
        share = share * weight.double()
    rows = (share[..., None] * feat.double()[:, :, None]).reshape(-1, feat.shape[-1])
    kept = cells.flatten() >= 0
    sums = rows.new_zeros((int(np.prod(shape)), rows.shape[1]))
    sums.index_add_(0, cells.flatten()[kept].long(), rows[kept])
    return sums.reshape(*shape, -1).permute(0, 4, 1, 2, 3)


class Pool(torch.nn.Module):
    """A splat between other layers."""

    def __init__(self, plan: SplatPlan, weighted: bool = False, logits: bool = False) -> None:
        super().__init__()
        self.plan, self.weighted, self.logits = plan, weighted, logits

    def forward(self, depth: Tensor, feat: Tensor) -> Tensor:
        weight = depth + 0.5 if self.weighted else None
        return splat(depth, feat * 2, self.plan, weight=weight, depth_logits=self.logits)


class Several(torch.nn.Module):
    """Splats of every signature."""

    def __init__(self, plan: SplatPlan) -> None:
        super().__init__()
        self.pools = torch.nn.ModuleList([Pool(plan, w, k) for w in (False, True) for k in (False, True)])

    def forward(self, depth: Tensor, feat: Tensor) -> Tensor:
        return torch.stack([pool(depth, feat) for pool in self.pools])


def session(model: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: Any, *inputs: Tensor) -> Tensor:
    opened = session(model)
    return torch.from_numpy(opened.run(None, {k.name: t.numpy() for k, t in zip(opened.get_inputs(), inputs)})[0])


def exported(model: torch.nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """The ``ModelProto``, as a file would hold it."""
    return export_onnx(model.eval(), inputs, **options).model_proto


def pool_nodes(proto: Any) -> list[Any]:
    return [node for node in proto.graph.node if (node.domain, node.op_type) == ("kernops", "BevPool")]


# --- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weighted", "logits", "dtype"),
    [
        (False, False, torch.float32),
        (True, False, torch.float32),
        (False, True, torch.float64),
        (True, True, torch.float16),
        (True, True, torch.float32),
    ],
    ids=str,
)
def test_onnxruntime_gives_torchs_numbers(weighted: bool, logits: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    cells, inputs = make_cells(), make_inputs(dtype)
    model = Pool(SplatPlan.from_cells(cells, SHAPE), weighted, logits).eval()
    export_onnx(model, inputs, tmp_path / "pool.onnx")
    onnx.checker.check_model(tmp_path / "pool.onnx", full_check=True)
    got = run(tmp_path / "pool.onnx", *inputs)
    depth, feat = inputs
    want = dense(depth, feat * 2, depth + 0.5 if weighted else None, cells, SHAPE, logits)
    bound = TOLERANCE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    torch.testing.assert_close(got, model(*inputs), rtol=bound, atol=bound)


@pytest.mark.parametrize("variant", ["cumsum", "atomic", "histogram"])
def test_the_variant_leaves_no_trace(variant: str) -> None:
    cells, inputs = make_cells(), make_inputs()
    proto = exported(Pool(SplatPlan.from_cells(cells, SHAPE, variant=variant)), inputs)
    (node,) = pool_nodes(proto)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"shape": list(SHAPE), "depth_logits": 0}
    assert len(node.input) == 3
    (held,) = (k for k in proto.graph.initializer if k.data_type == onnx.TensorProto.INT32)
    assert np.array_equal(onnx.numpy_helper.to_array(held), cells.numpy())


@pytest.mark.parametrize("opset", [18, 22])
def test_opsets(opset: int) -> None:
    cells, inputs = make_cells(), make_inputs()
    model = Pool(SplatPlan.from_cells(cells, SHAPE), True, True)
    proto = exported(model, inputs, opset=opset)
    assert {k.domain: k.version for k in proto.opset_import}[""] == opset
    assert {k.domain: k.version for k in proto.functions[0].opset_import} == {"": opset}
    torch.testing.assert_close(run(proto, *inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_splats_of_several_kinds_share_a_body() -> None:
    inputs = make_inputs()
    model = Several(SplatPlan.from_cells(make_cells(), SHAPE))
    proto = exported(model, inputs)
    assert [len(node.input) for node in pool_nodes(strip_functions(proto))] == [3, 3, 4, 4]
    assert [(f.domain, f.name, f.overload) for f in proto.functions] == [("kernops", "BevPool", "")]
    torch.testing.assert_close(run(proto, *inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_dropped_points_do_not_spoil_the_sums() -> None:
    cells = make_cells()
    model = Pool(SplatPlan.from_cells(cells, SHAPE))
    depth, feat = make_inputs()
    proto = exported(model, (depth, feat))
    want = model(depth, feat)
    depth = torch.where(cells < 0, torch.nan, depth)
    torch.testing.assert_close(run(proto, depth, feat), want, rtol=1e-5, atol=1e-5)


# --- dynamic shapes ---------------------------------------------------------------------------------------------------
class PoolOfCells(torch.nn.Module):
    """The geometry is an input."""

    def forward(self, depth: Tensor, feat: Tensor, cells: Tensor) -> Tensor:
        shape = (depth.shape[0], *SHAPE[1:])
        return torch.ops.kernops.bev_pool(depth, feat, None, cells, [], shape, "atomic", "auto", False)


@pytest.fixture(scope="module")
def dynamic() -> Any:
    batch, depths, rows, columns = (torch.export.Dim(name) for name in ("samples", "depths", "rows", "columns"))
    points = {0: batch, 2: depths, 3: rows, 4: columns}
    shapes = (points, {0: batch, 2: rows, 3: columns}, points)
    return exported(PoolOfCells(), (*make_inputs(), make_cells()), dynamic_shapes=shapes)


@pytest.mark.parametrize("points", [(1, 3, 1, 2, 3), (3, 3, 7, 5, 2), (2, 3, 11, 1, 1)])
def test_any_number_of_points(points: tuple[int, ...], dynamic: Any) -> None:
    shape = (points[0], *SHAPE[1:])
    cells, (depth, feat) = make_cells(points, shape), make_inputs(points=points)
    want = dense(depth, feat, None, cells, shape, False).permute(0, 2, 3, 4, 1)
    torch.testing.assert_close(run(dynamic, depth, feat, cells).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_a_cell_beyond_the_grid_is_an_error(beyond: int, dynamic: Any) -> None:
    cells = make_cells()
    cells[1, 2, 3, 1, 2] = int(np.prod(SHAPE)) + beyond
    with pytest.raises(Exception, match="ScatterND"):
        run(dynamic, *make_inputs(), cells)


# --- bodies -----------------------------------------------------------------------------------------------------------
PLAIN = """
<ir_version: 10, opset_import: ["" : 20, "kernops" : 1]>
pool (float[1,1,1,1,2] depth, float[1,1,1,2,3] feat, int64[1,1,1,1,2] cells) => (float[1,1,2,2,3] bev)
{ bev = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 0> (depth, feat, cells) }
"""
BRANCHES = """
<ir_version: 10, opset_import: ["" : 20, "kernops" : 1]>
pool (float[1,1,1,1,2] depth, float[1,1,1,2,3] feat, int64[1,1,1,1,2] cells) => (float[1,1,2,2,3] bev)
{
  yes = Constant <value = bool {1}> ()
  bev = If (yes) <
    then_branch = plain () => (a) {
      a = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 0> (depth, feat, cells)
    },
    else_branch = logits () => (b) {
      b = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 1> (depth, feat, cells)
    }
  >
}
"""
FUNCTION = """
<ir_version: 10, opset_import: ["" : 20, "kernops" : 1, "local" : 1]>
pool (float[1,1,1,1,2] depth, float[1,1,1,2,3] feat, int64[1,1,1,1,2] cells) => (float[1,1,2,2,3] bev)
{ bev = local.Twice (depth, feat, cells) }
<opset_import: ["" : 20, "kernops" : 1], domain: "local">
Twice (depth, feat, cells) => (twice)
{
  once = kernops.BevPool <shape = [1, 1, 2, 2], depth_logits = 0> (depth, feat, cells)
  twice = Add (once, once)
}
"""
SMALL = (
    torch.tensor([2.0, 3.0]).reshape(1, 1, 1, 1, 2),
    torch.tensor([[1.0, 10.0, 100.0], [5.0, 6.0, 7.0]]).reshape(1, 1, 1, 2, 3),
    torch.tensor([3, -1]).reshape(1, 1, 1, 1, 2),
)
WANT = torch.tensor([[0.0] * 3] * 3 + [[2.0, 20.0, 200.0]]).reshape(1, 1, 2, 2, 3)


def parse(text: str, *changes: tuple[str, str]) -> Any:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return onnx.parser.parse_model(text)


def test_bodies_come_and_go() -> None:
    bare = parse(PLAIN)
    before = bare.SerializeToString()
    complete = with_functions(bare)
    assert torch.equal(run(complete, *SMALL), WANT)
    assert bare.SerializeToString() == before, "the model that was given has changed"
    stripped = strip_functions(complete)
    assert len(complete.functions) == 1 and not stripped.functions
    with pytest.raises(Exception, match="BevPool.* is not a registered function"):
        session(stripped)
    assert torch.equal(run(with_functions(stripped), *SMALL), WANT)
    assert len(with_functions(complete).functions) == 1


def test_an_exported_model_without_bodies_is_the_stripped_one() -> None:
    inputs = make_inputs()
    model = Several(SplatPlan.from_cells(make_cells(), SHAPE))
    bare, complete = exported(model, inputs, functions=False), exported(model, inputs)
    assert not bare.functions
    for stripped in (bare, strip_functions(complete)):
        assert [len(node.input) for node in pool_nodes(stripped)] == [3, 3, 4, 4]
        assert [node.op_type for node in stripped.graph.node] == [node.op_type for node in bare.graph.node]
        torch.testing.assert_close(run(with_functions(stripped), *inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_a_depth_of_unknown_dtype() -> None:
    """``local.F`` stands for an operator whose result onnx cannot tell: then the body is right for every dtype."""
    changes = (
        ("bev = kernops", "other = local.F (depth)\n  bev = kernops"),
        ("(depth, feat, cells) }", "(other, feat, cells) }"),
    )
    complete = with_functions(parse(PLAIN, *changes, ('"kernops" : 1', '"kernops" : 1, "local" : 1')))
    complete.functions.append(
        onnx.parser.parse_function('<opset_import: ["" : 20], domain: "local"> F (x) => (y) { y = Identity (x) }')
    )
    assert torch.equal(run(complete, *SMALL), WANT)


def test_an_ir_model_stays_one() -> None:
    bare = ir.from_proto(parse(PLAIN))
    complete = with_functions(bare)
    assert isinstance(complete, ir.Model) and list(complete.functions) == [("kernops", "BevPool", "")]
    assert not bare.functions and not strip_functions(complete).functions
    assert torch.equal(run(ir.to_proto(complete), *SMALL), WANT)


def test_a_dynamic_number_of_samples_is_that_of_depth() -> None:
    proto = with_functions(parse(PLAIN, ("shape = [1,", "shape = [-1,")))
    assert torch.equal(run(proto, *SMALL), WANT)


def test_an_empty_fourth_input_is_none() -> None:
    bare = parse(PLAIN, ("(depth, feat, cells) }", '(depth, feat, cells, "") }'))
    assert torch.equal(run(with_functions(bare), *SMALL), WANT)


@pytest.mark.parametrize("first", [1, 0])
@pytest.mark.parametrize("weight", ["", ", depth"])
def test_nodes_in_branches(weight: str, first: int) -> None:
    """One of them with a weight, or none."""
    bare = parse(BRANCHES, ("{1}", f"{{{first}}}"), ("cells)\n    },", f"cells{weight})\n    }},"))
    complete = with_functions(bare)
    want = WANT * (2 if weight else 1) if first else WANT / 2  # the softmax of one depth is 1
    assert torch.equal(run(complete, *SMALL), want)
    assert strip_functions(complete) == strip_functions(bare)


def test_nodes_in_other_functions() -> None:
    complete = with_functions(parse(FUNCTION))
    assert torch.equal(run(complete, *SMALL), 2 * WANT)
    assert [(f.domain, f.name) for f in strip_functions(complete).functions] == [("local", "Twice")]


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", [with_functions, strip_functions])
def test_what_is_no_model(function: Any) -> None:
    with pytest.raises(TypeError, match="must be an onnx.ModelProto or an onnx_ir.Model; got str"):
        function("pool.onnx")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["" : 20', '["" : 15', "opset 15; a body of kernops::BevPool needs opset 16"),
        (
            "depth_logits = 0",
            "logits = 0",
            r"inputs depth, feat, cells.*got 3 inputs and attributes \['logits', 'shape'\]",
        ),
        ("(depth, feat, cells) }", "(depth, feat) }", "got 2 inputs"),
    ],
)
def test_models_that_cannot_have_bodies(old: str, new: str, message: str) -> None:
    model = parse(
        PLAIN, (old, new), *([("(depth, feat, cells) }", "(other, feat, cells) }")] if "other" in new else [])
    )
    with pytest.raises(ValueError, match=message):
        with_functions(model)


def test_an_opset_that_is_too_old() -> None:
    with pytest.raises(ValueError, match="opset must be at least 18.*got 17"):
        export_onnx(Pool(SplatPlan.from_cells(make_cells(), SHAPE)), make_inputs(), opset=17)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dynamo": False}, ValueError, "dynamo must be True: .*; got False"),
        ({"opset_version": 20}, TypeError, "opset_version is called opset here; got opset_version=20"),
        ({"f": "pool.onnx"}, TypeError, "f is called path here; got f='pool.onnx'"),
        ({"opset": "20"}, TypeError, "opset must be an integer or None; got '20'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export_onnx(Pool(SplatPlan.from_cells(make_cells(), SHAPE)), make_inputs(), **options)


def test_options_that_say_nothing_new() -> None:
    model = Pool(SplatPlan.from_cells(make_cells(), SHAPE))
    proto = exported(model, make_inputs(), dynamo=True, custom_translation_table=None)
    assert len(pool_nodes(proto)) == 1


class PoolOfFrustum(torch.nn.Module):
    def __init__(self, plan: SplatPlan) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, x: Tensor) -> Tensor:
        return splat_features(x, self.plan)


class Eigenvalues(torch.nn.Module):
    """ONNX has no operator for it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).abs()


def test_operators_that_cannot_be_exported() -> None:
    model, x = PoolOfFrustum(SplatPlan.from_cells(make_cells(), SHAPE)).eval(), torch.rand(*POINTS, CHANNELS)
    model(x)
    with pytest.raises(ValueError, match=r"splat alone can be exported to ONNX; .*torch.ops.kernops.bucketed_sum"):
        export_onnx(model, (x,))


def test_other_errors_of_the_exporter_are_left_alone() -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError):
        export_onnx(Eigenvalues().eval(), (torch.rand(3, 3),))


@pytest.mark.parametrize("missing", ["onnx", "onnx_ir", "onnxscript"])
def test_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"'{missing}'.*pip install \"kernops\[onnx\]\""):
        export_onnx(Pool(SplatPlan.from_cells(make_cells(), SHAPE)).eval(), make_inputs())


def test_importing_loads_no_onnx() -> None:
    code = "import sys, kernops.geometric.deploy; print({'onnx', 'onnx_ir', 'onnxscript'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"

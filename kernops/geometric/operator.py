"""The table of the operators of this package, in ``torch.ops.kernops``: a row says all about one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arguments import check_pool, check_pool_backward, check_rows
from .calls import PLAIN, TABLE, Row, apply, records
from .pool import bev_pool, bev_pool_backward, differentiable_backward, differentiable_pool, shaped
from .sums import Cumsum, Gather, Sum, bucketed_cumsum, bucketed_gather, bucketed_sum

_BUCKETS = "Tensor buckets, Tensor[] levels, SymInt n_buckets, str backend"
_POOL = (
    "Tensor depth, Tensor feat, Tensor? weight, Tensor cells, Tensor[] levels, SymInt[] shape, str variant, "
    "str backend, bool depth_logits"
)

TABLE |= {
    "bucketed_sum": Row(
        f"(Tensor values, {_BUCKETS}) -> Tensor",
        lambda t, b, *rest: check_rows(b.shape[0], t, b, *rest), bucketed_sum,
        lambda values, buckets, levels, n, backend: values.new_empty((n, values.shape[1])),
        lambda values, buckets, levels, n, backend: apply(Sum, values, buckets, n, backend, *levels),
    ),
    "bucketed_gather": Row(
        f"(Tensor rows, {_BUCKETS}) -> Tensor",
        lambda t, b, *rest: check_rows(rest[1], t, b, *rest), bucketed_gather,
        lambda rows, buckets, levels, n, backend: rows.new_empty((buckets.shape[0], rows.shape[1])),
        lambda rows, buckets, levels, n, backend: apply(Gather, rows, buckets, n, backend, *levels),
    ),
    "bucketed_cumsum": Row(
        "(Tensor values, Tensor order, Tensor starts, bool reverse, str backend) -> Tensor",
        lambda t, order, *rest: check_rows(order.shape[0], t, order, *rest), bucketed_cumsum,
        lambda values, order, starts, reverse, backend: values.new_empty(values.shape),
        lambda *args: apply(Cumsum, *args),
    ),
    "bev_pool": Row(
        f"({_POOL}) -> Tensor", check_pool, bev_pool,
        lambda depth, feat, weight, cells, levels, shape, *how: feat.new_empty((*shape, feat.shape[-1])),
        differentiable_pool,
    ),
    "bev_pool_backward": Row(
        f"(Tensor grad, {_POOL}, bool[3] output_mask) -> (Tensor grad_depth, Tensor grad_feat, Tensor grad_weight)",
        check_pool_backward, bev_pool_backward,
        lambda grad, depth, feat, weight, *rest: shaped(depth, feat, weight, rest[-1], torch.Tensor.new_empty),
        differentiable_backward,
    ),
}  # fmt: skip

_library = torch.library.Library("kernops", "FRAGMENT")


def _register(name: str, row: Row) -> None:
    _library.define(f"{name}{row.schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        # Shapes of fake tensors are not compared: that would say something about dynamic sizes.
        return lambda *args: function(*(row.check(*args) if args[0].__class__ in PLAIN else args))

    def record(*args: Any) -> Any:
        if records(args):
            return row.differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kernops, name)(*args)

    _library.impl(name, checked(row.compute), "CompositeExplicitAutograd")
    _library.impl(name, checked(record), "Autograd")
    torch.library.register_fake(f"kernops::{name}", row.fake, lib=_library)
    # Under torch.func, before it takes the call apart: for a library's operator it has no derivatives.
    _library.impl(name, checked(row.differentiable), "FuncTorchDynamicLayerFrontMode")


for _name, _row in TABLE.items():
    _register(_name, _row)

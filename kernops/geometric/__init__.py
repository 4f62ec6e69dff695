"""Bird's-eye-view pooling of camera features (lift-splat), and the sums by bucket that it is made of."""

from . import operator  # noqa: F401  (registers torch.ops.kernops, which loaded programs look for)
from .buckets import BucketPlan as BucketPlan
from .buckets import bucketed_cumsum as bucketed_cumsum
from .buckets import bucketed_sum as bucketed_sum
from .frustum import Frustum as Frustum
from .frustum import frustum as frustum
from .grid import BEVGrid as BEVGrid
from .plan import SplatPlan as SplatPlan
from .rig import CameraRig as CameraRig
from .rig import nuscenes_rig as nuscenes_rig
from .splat import splat as splat
from .splat import splat_features as splat_features

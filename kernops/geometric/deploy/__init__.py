"""Models that use the splat, outside of torch: ONNX files for onnxruntime, and for engines that bring a plugin."""

from .bodies import strip_functions, with_functions
from .onnx import export_onnx

__all__ = ["export_onnx", "strip_functions", "with_functions"]

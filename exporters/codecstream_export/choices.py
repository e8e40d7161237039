"""What an export can be asked for; light, for the command line's help."""

RUNTIMES = ("onnx", "executorch", "torch_export")
PRECISIONS = ("fp32", "fp16", "int8")
MODES = ("stateful", "windowed")

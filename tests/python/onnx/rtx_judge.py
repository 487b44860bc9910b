"""TensorRT-RTX as a judge: its parser and its ahead-of-time builder, which need no GPU."""

from __future__ import annotations

import tensorrt_rtx_bindings as trt


class _Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity, message):
        if severity <= trt.ILogger.WARNING:
            self.lines.append(message)


class Judge:
    """Verdicts for compute capability 8.9."""

    def __init__(self) -> None:
        self.log = _Log()
        self.builder = trt.Builder(self.log)

    def verdict(self, model: bytes) -> str:
        """ "reject_parse", "fail_build" or "accept"; the reasons stand in log.lines."""
        self.log.lines.clear()
        network = self.builder.create_network(0)
        if not trt.OnnxParser(network, self.log).parse(model):
            return "reject_parse"
        config = self.builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        profile = self.builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            if -1 in tensor.shape:
                shape = [2 if extent == -1 else extent for extent in tensor.shape]
                profile.set_shape(tensor.name, shape, shape, shape)
        config.add_optimization_profile(profile)
        return "fail_build" if self.builder.build_serialized_network(network, config) is None else "accept"

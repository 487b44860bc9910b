"""torch.ops.polyop.*: signatures, fakes and compilation, for every operator that the schemas list."""

import pytest
import torch
from small_calls import example
from torch._subclasses.fake_tensor import FakeTensorMode

from polyop import ops


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_registered_operator_equals_direct_call(name):
    args, kwargs = example(name)
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    direct = getattr(ops, name)(*args, **kwargs)
    registered = getattr(torch.ops.polyop, name)(*copies, **kwargs)
    for mine, theirs in zip(args, copies, strict=True):
        assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs), "in-place operands differ"
    direct = direct if isinstance(direct, tuple) else (direct,)
    registered = registered if isinstance(registered, tuple) else (registered,)
    for mine, theirs in zip(direct, registered, strict=False):
        assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_fake_has_the_shapes_of_the_call(name):
    args, kwargs = example(name)
    real = getattr(torch.ops.polyop, name)(*args, **kwargs)
    with FakeTensorMode() as mode:
        convert = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
        fake = getattr(torch.ops.polyop, name)(*map(convert, args), **{k: convert(v) for k, v in kwargs.items()})
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for mine, theirs in pairs:
        assert (mine is None and theirs is None) or (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_opcheck(name):
    args, kwargs = example(name)
    torch.library.opcheck(getattr(torch.ops.polyop, name).default, args, kwargs)


def test_mutation_marks_follow_the_schema():
    for name, schema in ops.SCHEMAS.items():
        arguments = {arg.name: arg for arg in getattr(torch.ops.polyop, name).default._schema.arguments}
        for operand in schema.inputs:
            alias = arguments[operand.name].alias_info
            assert (alias is not None and alias.is_write) == (operand.role == "in_out"), f"{name}.{operand.name}"


def test_compiles_without_a_graph_break_on_dynamic_sizes():
    function = torch.compile(
        lambda x: torch.ops.polyop.circular_pad(x, [1, 2]) + 1, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for columns in (4, 7):
        x = torch.rand(3, columns)
        assert torch.equal(function(x), ops.circular_pad(x, [1, 2]) + 1)


def test_every_function_documents_its_operands():
    for name, schema in ops.SCHEMAS.items():
        text = getattr(ops, name).__doc__
        for operand in schema.operands:
            assert operand.name in text
        for attribute in schema.attributes:
            assert attribute.name in text

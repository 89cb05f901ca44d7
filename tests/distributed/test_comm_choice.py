"""comm= of dedicate_params where peers cannot be read: what is refused, and that every rank decides alike."""

import pytest
import torch
from reference import TinyModel, batch, is_matrix, loss_of
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon


@pytest.fixture(autouse=True)
def on_cpu(mesh) -> None:
    if mesh.device_type != "cpu":
        pytest.skip("of ranks without GPUs; test_peer_copy.py has the others")


@pytest.mark.parametrize("comm", ["auto", "nccl"])
def test_the_backend_moves_the_bytes(mesh, rank, comm):
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, comm=comm)
    assert not any(communicator.copies_from_peers() for communicator in model._dmuon.comms[:2])
    assert dmuon.memory_report(model).outgoing == 0
    loss_of(model, batch(0, rank)).backward()


def test_an_unknown_value_names_the_known_ones(mesh):
    with pytest.raises(ValueError, match=r"'auto', 'nccl', 'peer'.*'symmetric'"):
        dmuon.dedicate_params(TinyModel(), mesh, is_matrix, comm="symmetric")


def test_peers_that_cannot_be_are_refused_with_the_reason(mesh, rank):
    model = TinyModel()
    with pytest.raises(ValueError, match=r'comm="peer" is not possible here: the mesh is on cpu, not on CUDA'):
        dmuon.dedicate_params(model, mesh, is_matrix, comm="peer")
    dmuon.dedicate_params(model, mesh, is_matrix)  # nothing has been changed
    loss_of(model, batch(0, rank)).backward()


def test_a_dtype_that_nothing_but_the_backend_adds_up(mesh, rank):
    model = TinyModel()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    dmuon.dedicate_params(model, mesh, is_matrix, mp_policy=policy)
    loss_of(model, batch(0, rank)).backward()

"""Other people's distributed code, unchanged, on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kpool_testing import DeadlockError, assert_replicated, simulate


@pytest.fixture(params=["portable", "gloo", "nccl"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Every dialect must let correct code pass."""
    return str(request.param)


class TestDTensor:
    @pytest.mark.parametrize(("size", "rows"), [(2, 7), (3, 7), (3, 2), (4, 1)])
    def test_uneven_shards(self, size: int, rows: int, dialect: str) -> None:
        whole = torch.arange(rows * 6.0).reshape(rows, 6)

        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (size,))
            sharded = distribute_tensor(whole, mesh, [Shard(0)])
            columns = sharded.redistribute(mesh, [Shard(1)])
            return sharded.to_local(), sharded.full_tensor(), columns.full_tensor(), (sharded * 2).sum(0).full_tensor()

        run = simulate(body, size, dialect=dialect)
        assert torch.equal(torch.cat([result[0] for result in run.results]), whole)
        for _, full, through_columns, total in run.results:
            assert torch.equal(full, whole)
            assert torch.equal(through_columns, whole)
            assert torch.equal(total, whole.sum(0) * 2)

    def test_matmul_with_backward_matches_one_process(self, dialect: str) -> None:
        torch.manual_seed(0)
        x, w = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)

        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (3,))
            left = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
            right = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
            (left @ right).square().sum().backward()
            return left.grad.full_tensor(), right.grad.full_tensor()

        left, right = x.clone().requires_grad_(), w.clone().requires_grad_()
        (left @ right).square().sum().backward()
        for grads in simulate(body, 3, dialect=dialect).results:
            torch.testing.assert_close(grads, (left.grad, right.grad))

    def test_partial_is_summed(self) -> None:
        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (3,))
            part = DTensor.from_local(torch.full((4,), float(group.rank())), mesh, [Partial()])
            return part.full_tensor()

        assert all(torch.equal(result, torch.full((4,), 3.0)) for result in simulate(body, 3).results)

    def test_tensor_parallel_module(self) -> None:
        def model() -> nn.Sequential:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()

        x = torch.arange(12, dtype=torch.float64).reshape(2, 6)

        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (2,))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            return parallelize_module(model(), mesh, plan)(x).detach()

        expected = model()(x).detach()
        for result in simulate(body, 2).results:
            torch.testing.assert_close(result, expected)


class TestDeviceMesh:
    def test_two_dims(self, dialect: str) -> None:
        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            tp = torch.full((2,), float(group.rank()))
            dp = tp.clone()
            dist.all_reduce(tp, group=mesh.get_group("tp"))
            dist.all_reduce(dp, group=mesh["dp"].get_group())
            return tp[0].item(), dp[0].item(), tuple(mesh.get_coordinate())

        expected = [(3.0 if rank < 3 else 12.0, 2.0 * (rank % 3) + 3.0, divmod(rank, 3)) for rank in range(6)]
        assert simulate(body, 6, dialect=dialect).results == expected

    def test_tensor_sharded_over_both(self) -> None:
        whole = torch.arange(35.0).reshape(5, 7)

        def body(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (2, 2))
            return distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).full_tensor()

        assert all(torch.equal(result, whole) for result in simulate(body, 4).results)


class TestDataParallel:
    def test_ddp_averages_gradients(self, dialect: str) -> None:
        def body(group: Any) -> Any:
            torch.manual_seed(group.rank())
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3).double())
            x = torch.full((2, 4), float(group.rank() + 1), dtype=torch.float64)
            model(x).square().sum().backward()
            return model.module.weight.detach(), model.module.bias.detach(), model.module.weight.grad

        run = simulate(body, 3, dialect=dialect)
        assert_replicated(run.results)
        weight, bias, grad = run.results[0]
        expected = []
        for rank in range(3):
            layer = nn.Linear(4, 3).double()
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            layer(torch.full((2, 4), float(rank + 1), dtype=torch.float64)).square().sum().backward()
            expected.append(layer.weight.grad)
        torch.testing.assert_close(grad, torch.stack(expected).mean(0))

    def test_ddp_rank_that_skips_backward_is_named(self) -> None:
        def body(group: Any) -> None:
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
            loss = model(torch.ones(2, 4)).sum()
            if group.rank() != 1:
                loss.backward()

        with pytest.raises(DeadlockError, match=r"missing ranks \[1\]") as caught:
            simulate(body, 3, limit=10)
        assert "test_third_party.py" in str(caught.value)

    def test_fsdp2_trains_like_one_process(self) -> None:
        from torch.distributed.fsdp import fully_shard

        def model() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()

        data = [torch.full((2, 4), float(rank + 1), dtype=torch.float64) for rank in range(2)]

        def train(net: nn.Module, loss: Any) -> list[torch.Tensor]:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                loss(net).backward()
                optimizer.step()
            return list(net.parameters())

        def body(group: Any) -> Any:
            net, mesh = model(), init_device_mesh("cpu", (group.size(),))
            fully_shard(net[0], mesh=mesh)
            fully_shard(net[2], mesh=mesh)
            fully_shard(net, mesh=mesh)
            parameters = train(net, lambda net: net(data[group.rank()]).square().mean())
            return [parameter.full_tensor().detach() for parameter in parameters]

        expected = train(model(), lambda net: sum(net(x).square().mean() for x in data) / 2)
        run = simulate(body, 2)
        assert_replicated(run.results)
        torch.testing.assert_close(run.results[0], [parameter.detach() for parameter in expected])


class TestFunctionalCollectives:
    def test_gather_and_reduce_scatter_are_each_others_backward(self, dialect: str) -> None:
        def body(group: Any) -> Any:
            x = (torch.arange(6.0).reshape(2, 3) + 10 * group.rank()).requires_grad_()
            gathered = funcol.all_gather_tensor_autograd(x, 0, group)
            back = funcol.reduce_scatter_tensor_autograd(gathered * 2, "sum", 0, group)
            (back * torch.ones(2, 3)).sum().backward()
            return back.detach().clone(), x.grad

        for rank, (back, grad) in enumerate(simulate(body, 3, dialect=dialect).results):
            assert torch.equal(back, (torch.arange(6.0).reshape(2, 3) + 10 * rank) * 6)
            assert torch.equal(grad, torch.full((2, 3), 6.0))

    def test_collectives_inside_backward_of_a_chain(self) -> None:
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                out = x.clone()
                dist.all_reduce(out)
                return out

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad

        def body(group: Any) -> Any:
            x = torch.full((2,), float(group.rank() + 1), requires_grad=True)
            y = x
            for _ in range(5):
                y = Sum.apply(y)
            y.sum().backward()
            return y.detach(), x.grad

        for value, grad in simulate(body, 3).results:
            assert torch.equal(value, torch.full((2,), 6.0 * 3**4))
            assert torch.equal(grad, torch.full((2,), 3.0**5))


class TestCheckpoint:
    def test_save_and_load_with_another_number_of_ranks(self, tmp_path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        whole = torch.arange(10.0)

        def save(group: Any) -> None:
            mesh = init_device_mesh("cpu", (group.size(),))
            state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.ones(3)}
            dcp.save(state, checkpoint_id=tmp_path / "state")

        def load(group: Any) -> Any:
            mesh = init_device_mesh("cpu", (group.size(),))
            state = {"sharded": distribute_tensor(torch.zeros(10), mesh, [Shard(0)]), "plain": torch.zeros(3)}
            dcp.load(state, checkpoint_id=tmp_path / "state")
            return state["sharded"].full_tensor(), state["plain"]

        simulate(save, 2)
        for sharded, plain in simulate(load, 3).results:
            assert torch.equal(sharded, whole)
            assert torch.equal(plain, torch.ones(3))


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # of imports that megatron-core tries
class TestMegatron:
    """megatron-core's own tensor parallel code; it asks CUDA for a device, and is told the CPU."""

    @pytest.fixture(autouse=True)
    def on_cpu(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        yield

    @staticmethod
    def parallel(body: Any, dialect: str) -> Any:
        def started(group: Any) -> Any:
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
            return body(parallel_state, group)

        return simulate(started, 4, dialect=dialect, isolate=["megatron.core.parallel_state"])

    def test_tp2_dp2_groups(self, dialect: str) -> None:
        from megatron.core import parallel_state as outside

        def body(state: Any, group: Any) -> Any:
            tp = torch.full((1,), float(group.rank()))
            dp = tp.clone()
            dist.all_reduce(tp, group=state.get_tensor_model_parallel_group())
            dist.all_reduce(dp, group=state.get_data_parallel_group())
            sizes = (state.get_tensor_model_parallel_world_size(), state.get_data_parallel_world_size())
            ranks = (state.get_tensor_model_parallel_rank(), state.get_data_parallel_rank())
            return sizes, ranks, tp.item(), dp.item()

        run = self.parallel(body, dialect)
        assert run.results == [
            ((2, 2), (0, 0), 1.0, 2.0),
            ((2, 2), (1, 0), 1.0, 4.0),
            ((2, 2), (0, 1), 5.0, 2.0),
            ((2, 2), (1, 1), 5.0, 4.0),
        ]
        assert not outside.model_parallel_is_initialized()

    def test_mappings_forward_and_backward(self, dialect: str) -> None:
        def body(state: Any, group: Any) -> Any:
            from megatron.core.tensor_parallel import mappings

            rank = state.get_tensor_model_parallel_rank()
            x = (torch.arange(4.0).reshape(1, 4) + 10 * rank).requires_grad_()
            gathered = mappings.gather_from_tensor_model_parallel_region(x)
            (gathered * torch.arange(8.0)).sum().backward()
            y = torch.full((2,), float(rank + 1), requires_grad=True)
            reduced = mappings.reduce_from_tensor_model_parallel_region(y)
            reduced.sum().backward()
            z = torch.arange(4.0).reshape(4, 1).requires_grad_()
            scattered = mappings.scatter_to_sequence_parallel_region(z)
            (mappings.gather_from_sequence_parallel_region(scattered) * 2).sum().backward()
            summed = mappings.reduce_scatter_to_sequence_parallel_region(torch.arange(4.0).reshape(4, 1))
            copied = torch.ones(2, requires_grad=True)
            (mappings.copy_to_tensor_model_parallel_region(copied) * (rank + 1)).sum().backward()
            return rank, gathered.detach(), x.grad, reduced.detach(), scattered.detach(), z.grad, summed, copied.grad

        for rank, gathered, grad, reduced, scattered, z_grad, summed, copied in self.parallel(body, dialect).results:
            assert torch.equal(gathered, torch.tensor([[0.0, 1, 2, 3, 10, 11, 12, 13]]))
            assert torch.equal(grad, torch.arange(8.0)[None, 4 * rank : 4 * rank + 4])
            assert torch.equal(reduced, torch.full((2,), 3.0))
            assert torch.equal(scattered, torch.arange(4.0)[2 * rank : 2 * rank + 2, None])
            assert torch.equal(z_grad, torch.full((4, 1), 4.0))
            assert torch.equal(summed, 2 * torch.arange(4.0)[2 * rank : 2 * rank + 2, None])
            assert torch.equal(copied, torch.full((2,), 3.0))

    def test_column_then_row_parallel_linear(self, dialect: str) -> None:
        def body(state: Any, group: Any) -> Any:
            from megatron.core.model_parallel_config import ModelParallelConfig
            from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

            config = ModelParallelConfig(
                tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float64
            )
            torch.manual_seed(0)
            common: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
            up = ColumnParallelLinear(6, 8, gather_output=False, **common)
            down = RowParallelLinear(8, 4, input_is_parallel=True, skip_bias_add=False, **common)
            x = torch.arange(12, dtype=torch.float64).reshape(2, 6).requires_grad_()
            out = down(up(x)[0])[0]
            out.square().sum().backward()
            weights = [up.weight.detach(), down.weight.detach()]
            return state.get_tensor_model_parallel_rank(), out.detach(), x.grad, weights

        results = self.parallel(body, dialect).results
        up = torch.cat([results[0][3][0], results[1][3][0]])
        down = torch.cat([results[0][3][1], results[1][3][1]], dim=1)
        x = torch.arange(12, dtype=torch.float64).reshape(2, 6).requires_grad_()
        expected = x @ up.T @ down.T
        expected.square().sum().backward()
        for _, out, grad, _ in results:
            torch.testing.assert_close(out, expected.detach())
            torch.testing.assert_close(grad, x.grad)

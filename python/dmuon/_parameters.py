"""The tensors of a dedication: what users see, what modules compute with, and what the runtime takes of both."""

import torch
import torch.nn as nn

from ._cut import CutMesh, CutParam, PlanRows
from ._handles import DedicatedParam
from ._select import Matrix, master_dtype


class Parameters:
    """Of the selected parameters; the runtime moves their data into its buffers."""

    def __init__(
        self,
        rows: PlanRows,
        owned: list[bool],
        cut_mesh: CutMesh,
        matrices: list[Matrix],
        compute: tuple[torch.dtype | None, torch.device],
    ) -> None:
        """owned: [plan rows] by this rank.  compute: the dtype (None: their own) and the device to compute with."""
        self.unsharded: list[nn.Parameter] = []
        self.of_plan: tuple[list, list, list] = ([], [], [])
        """[plan rows] the registered tensor, the unsharded one, and of a part what users see."""
        self._rows = rows
        self._owned = owned
        self._cut_mesh = cut_mesh
        self._matrices = matrices
        self._registered = [
            self._add(matrix.parameter, places, *compute) for matrix, places in zip(matrices, rows.places, strict=True)
        ]

    def _add(
        self, original: nn.Parameter, places: list[int], dtype: torch.dtype | None, device: torch.device
    ) -> nn.Parameter:
        empty = torch.empty(0, dtype=dtype or original.dtype, device=device)
        self.unsharded.append(nn.Parameter(empty, requires_grad=original.requires_grad))
        on = torch.device("meta") if original.is_meta else device
        if len(places) == 1:
            return self._add_whole(original, places[0], on)
        return self._add_cut(original, places, on)

    def _add_whole(self, original: nn.Parameter, row: int, device: torch.device) -> nn.Parameter:
        data = original.detach().to(master_dtype(original.dtype)).to(device if self._owned[row] else "meta")
        registered = nn.Parameter(data, requires_grad=original.requires_grad)
        self._add_row(registered, None)
        return registered

    def _add_cut(self, original: nn.Parameter, rows: list[int], device: torch.device) -> nn.Parameter:
        mine = original.detach()[slice(*self._part(rows)[1])]
        local = mine.to(master_dtype(original.dtype)).to(device)
        registered = self._cut_mesh.parameter(local, original.shape, original.requires_grad)
        for row in rows:
            first, last = self._rows.part(row)
            elsewhere = torch.empty(last - first, *local.shape[1:], dtype=local.dtype, device="meta")
            self._add_row(registered._local_tensor if self._owned[row] else elsewhere, registered)
        return registered

    def _part(self, rows: list[int]) -> tuple[int, tuple[int, int]]:
        """This rank's part among `rows` and its range; without one the first part, and no rows at the end."""
        mine = [row for row in rows if self._owned[row]]
        if mine:
            return mine[0], self._rows.part(mine[0])
        end = self._rows.part(rows[-1])[1]
        return rows[0], (end, end)

    def _add_row(self, registered: torch.Tensor, shown: nn.Parameter | None) -> None:
        for column, tensor in zip(self.of_plan, (registered, self.unsharded[-1], shown), strict=True):
            column.append(tensor)

    def handles(self, runtime: torch.ScriptObject, one_dimensional: bool) -> list[DedicatedParam]:
        """One for each parameter."""
        of_row = runtime.params()
        params: list[DedicatedParam] = []
        for matrix, registered, places in zip(self._matrices, self._registered, self._rows.places, strict=True):
            if len(places) > 1:
                row, part = self._part(places)
                params.append(CutParam(of_row[row], row, registered, matrix.name, part, self._cut_mesh))
            else:
                what = (registered, one_dimensional, matrix.elementwise)
                params.append(DedicatedParam(of_row[places[0]], places[0], *what))
        return params

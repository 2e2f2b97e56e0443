"""The inputs of one batch of short sequences: gathered and padded; each key head of each is multiplied on its own."""

from __future__ import annotations

import torch

from dqkv_kernels.batches import Batch
from dqkv_kernels.gathering import RowPlaces
from dqkv_kernels.plan import Plan
from dqkv_kernels.visibility import Cover, Region


class BatchInputs:
    """The tensors of one batch as (sequences * key heads, group * rows, width), with a key head's whole group in rows.

    Padded queries are blind, padded keys are hidden, and keys that no query sees are 0: what lies there is nothing.
    """

    can_flash = False
    """PyTorch's kernel knows one mask for all, and would be chosen by what other sequences hold."""

    def __init__(self, plan: Plan, batch: Batch, precision: torch.dtype = torch.float32) -> None:
        shape, device = plan.problem.shape, plan.device
        self.plan = plan
        self.batch = batch
        self.precision = precision
        self._kv_heads, self._group = shape.num_heads_kv, shape.group_size
        self._query_places = RowPlaces(batch.q_start, batch.q_len, batch.rows, device)
        self._key_places = RowPlaces(batch.k_start, batch.k_len, batch.keys, device)
        seen = self._visible()
        self._mask = None if seen is None else self._over_heads(seen)
        self.blind = None if seen is None else self._over_heads(~seen.any(2))
        self._unseen_keys = None if seen is None else ~seen.any(1)
        self.regions = []
        if batch.keys:
            cover = Cover.FULL if seen is None else Cover.PARTIAL
            self.regions.append(Region(q0=0, q1=self._group * batch.rows, k0=0, k1=batch.keys, cover=cover))
        self._kept_keys: dict[str, torch.Tensor] = {}

    def has(self, role: str) -> bool:
        """Whether the tensor was given."""
        return role in self.plan.tensors

    def queries(self, role: str) -> torch.Tensor:
        """(heads, rows, width) of q or dout."""
        found = self._query_places.gather(self.plan.tensors[role], 3)
        rows = found.view(*found.shape[:2], self._kv_heads, self._group, found.shape[-1])
        return self._dense(rows.permute(0, 2, 3, 1, 4)).flatten(2, 3).flatten(0, 1)

    def out(self) -> torch.Tensor:
        """(heads, rows, width) of out."""
        return self.queries("out")

    def keys(self, role: str, region: Region) -> torch.Tensor:
        """(heads, keys, width) of k or v."""
        if role not in self._kept_keys:
            rows = self._dense(self._key_places.gather(self.plan.tensors[role], 3).transpose(1, 2))
            if self._unseen_keys is not None:
                rows.masked_fill_(self._unseen_keys[:, None, :, None], 0.0)
            self._kept_keys[role] = rows.flatten(0, 1)
        return self._kept_keys[role][:, region.k0 : region.k1]

    def statistics(self, role: str) -> torch.Tensor:
        """(heads, rows) of softmax_lse, delta or dlse."""
        rows = self._query_places.gather(self.plan.tensors[role].transpose(-1, -2), 2)
        return self._dense(rows.transpose(1, 2)).view(-1, self._group * self.batch.rows)

    def sink(self) -> torch.Tensor | None:
        """(heads, rows): the sink logits, or None."""
        sink = self.plan.tensors.get("sink")
        if sink is None:
            return None
        by_row = sink.to(self.precision).repeat_interleave(self.batch.rows).view(self._kv_heads, -1)
        return by_row.repeat(len(self.batch.numbers), 1)

    def mask(self, region: Region) -> torch.Tensor:
        """bool (heads or 1, rows, keys): which pairs are visible; only where the region says that some are not."""
        if self._mask is None:
            raise LookupError(f"every pair of {region} is visible")
        return self._mask

    def bias(self, region: Region) -> torch.Tensor:
        """Nothing: no kernel that asks for it may compute a batch."""
        raise LookupError(f"no bias for {region}")

    def rows_of(self, region: Region) -> slice:
        """The region's rows among the batch's."""
        return slice(region.q0, region.q1)

    def by_sequence(self, flags: torch.Tensor) -> torch.Tensor:
        """bool (sequences,): whether all of a sequence's flags, bool (heads,), are set."""
        return flags.view(-1, self._kv_heads).all(1)

    def by_head(self, terms: torch.Tensor) -> torch.Tensor:
        """(num_heads_q,): sums over the batch's own rows of terms (heads, rows)."""
        by_row = terms.view(-1, self._kv_heads, self._group, self.batch.rows)
        return by_row.masked_fill(~self._query_places.is_own[:, None, None], 0.0).sum((0, 3)).flatten()

    def write_queries(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Round values (heads, rows, width) into the batch's own rows of dq."""
        rows = values.view(-1, self._kv_heads, self._group, self.batch.rows, values.shape[-1])
        self._query_places.put(tensor, 3, rows.permute(0, 3, 1, 2, 4).flatten(2, 3))

    def write_keys(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Round values (heads, keys, width) into the batch's own rows of dk or dv."""
        self._key_places.put(tensor, 3, values.view(-1, self._kv_heads, *values.shape[1:]).transpose(1, 2))

    def write_statistics(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values (heads, rows) into the batch's own rows of softmax_lse."""
        rows = values.view(-1, self._kv_heads * self._group, self.batch.rows)
        self._query_places.put(tensor.transpose(-1, -2), 2, rows.transpose(1, 2))

    def _dense(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.precision).contiguous()

    def _visible(self) -> torch.Tensor | None:
        """bool (sequences or 1, rows, keys): which keys a query sees; None when it is all of them in every sequence."""
        batch, window = self.batch, self.plan.problem.options.window
        is_padded = self._query_places.is_padded or self._key_places.is_padded
        if batch.keys and not is_padded and window.left is None and window.right is None:
            return None
        count = len(batch.numbers) if is_padded else 1
        q_len, k_len = (
            torch.from_numpy(lengths[:count]).to(self.plan.device).view(-1, 1, 1)
            for lengths in (batch.q_len, batch.k_len)
        )
        i = torch.arange(batch.rows, device=self.plan.device).view(1, -1, 1)
        j = torch.arange(batch.keys, device=self.plan.device).view(1, 1, -1)
        seen = (i < q_len) & (j < k_len)
        diagonal = i + (k_len - q_len)
        if window.right is not None:
            seen &= j <= diagonal + window.right
        if window.left is not None:
            seen &= (j >= diagonal - window.left) | (j < window.sink_token_length)
        return seen

    def _over_heads(self, seen: torch.Tensor) -> torch.Tensor:
        """(sequences or 1, rows, ...) -> (heads or 1, group * rows, ...)."""
        heads = self._kv_heads if len(seen) > 1 else 1
        wide = seen[:, None, None].expand(-1, heads, self._group, *seen.shape[1:])
        return wide.reshape(len(seen) * heads, self._group * seen.shape[1], *seen.shape[2:])

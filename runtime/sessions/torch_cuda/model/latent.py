"""The maps of a layer whose heads share one latent (MLA): queries, and the one key whose
beginning is the value (kvlathe/layers/latent.py)."""

from __future__ import annotations

from torch import Tensor

from kvlathe.layers.latent import LatentForm, latent_rows
from kvlathe.layers.rows import Rows
from kvlathe.runtime.sessions.torch_cuda.model.coded import Product
from kvlathe.runtime.sessions.torch_cuda.model.linear import beside, has_map


class LatentMaps:
    """x [T, D] -> q [T, heads * d], k [T, d], v [T, width].

    k and the first map of queries are one product. Where queries have a latent of their
    own, a second map makes them of it."""

    def __init__(
        self,
        form: LatentForm,
        rows: Rows,
        tensors: dict[str, Tensor],
        product: Product,
        multiple: int,
    ) -> None:
        """``tensors`` by role, which are taken. Rows of products are padded to a
        ``multiple`` of numbers."""
        self.form, self.rows = form, rows
        own = has_map(tensors, "q_latent")
        roles = ["q_latent" if own else "q", "k"]
        self.first, self.widths = beside(tensors, roles, multiple, product)
        self.norm = tensors.pop("latent_norm.weight")
        self.q_norm = tensors.pop("q_latent_norm.weight", None)
        self.q = beside(tensors, ["q"], multiple, product)[0] if own else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = self.first(x).split_with_sizes(self.widths, -1)
        if self.q is not None and self.q_norm is not None:
            q = self.q(self.rows.rms_norm(q, self.q_norm, self.form.norm_eps))
        return q, *latent_rows(k, self._normalized, self.form.rank, self.form.width)

    def _normalized(self, latent: Tensor) -> Tensor:
        return self.rows.rms_norm(latent, self.norm, self.form.norm_eps)

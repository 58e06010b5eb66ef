"""The persistent batch of a phase, with rows that keep no state of earlier requests."""

from __future__ import annotations

from rbln_backend.vllm_compat.surface import BatchUpdate, CachedRequestState, InputBatch


class IsolatedInputBatch(InputBatch):
    """vLLM's input batch, with every row cleared before it is filled and after it is left.

    Upstream writes a row's mask of allowed tokens, bad words, generator, prompt embeddings and
    thinking budget only for requests that have them, and does not clear the source row of a move.
    A later request in that row would be sampled with the state of an earlier one.
    """

    def _register_add_request(self, request: CachedRequestState) -> int:
        """Return the row that ``add_request`` is about to fill, cleared."""
        row: int = super()._register_add_request(request)
        self._clear_row(row)
        return row

    def remove_request(self, req_id: str) -> int | None:
        row: int | None = super().remove_request(req_id)
        if row is not None:
            self._clear_row(row)
            self._drop_budget(row)
        return row

    def condense(self) -> None:
        rows = len(self._req_ids)
        super().condense()
        for row in range(self.num_reqs, rows):
            self._clear_row(row)

    def swap_states(self, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is None:
            super().swap_states(i1, i2)
            return
        first = mask[i1].clone()
        super().swap_states(i1, i2)
        # Upstream's exchange of two views writes the second row to both.
        mask[i2] = first

    def _clear_row(self, row: int) -> None:
        """Drop every field that upstream writes only for some of the requests."""
        self.generators.pop(row, None)
        self.bad_words_token_ids.pop(row, None)
        self.req_prompt_embeds.pop(row, None)
        self.request_lora_mapping[row] = 0
        # Penalties read the prompt tokens of requests with prompt embeddings as well.
        self.token_ids_cpu[row] = 0
        self.is_token_ids[row] = False
        if self.allowed_token_ids_mask_cpu_tensor is not None:
            self.allowed_token_ids_mask_cpu_tensor[row] = False

    def _drop_budget(self, row: int) -> None:
        """Drop the thinking budget of a freed row before another request moves into it.

        Upstream's holder would keep it for a request without a budget.
        """
        if self.thinking_budget_state_holder is not None:
            self.thinking_budget_state_holder.sync_batch(
                BatchUpdate(batch_size=self.num_reqs, removed=(row,), added=(), moved=())
            )

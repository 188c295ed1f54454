"""Paths of SGLang's, vLLM's and AReaL's APIs that this engine does not support: each answers 501 with the reason."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..edge.errors import SERVED, NotSupported

router = APIRouter(tags=["not supported"])

_IPC = "use update_weights_from_tensor, or update_weights_from_disk, instead"
_LORA = "use load_lora_adapter, or update_weights_from_tensor for the tensors of a loaded one"
_PATHS = {
    "/update_weights_from_ipc": f"the checkpoint-engine protocol is not supported: {_IPC}",
    "/load_lora_adapter_from_tensors": f"adapters in another form than a folder are not supported: {_LORA}",
    "/load_lora_adapter_from_distributed": f"adapters in another form than a folder are not supported: {_LORA}",
    **dict.fromkeys(
        ("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl", "/areal_update_weights_lora"),
        "adapters in another form than a folder are not supported: update them by weight_update_mode=disk",
    ),
    "/init_weights_send_group_for_remote_instance": "transfers between engines are not supported",
    "/send_weights_to_remote_instance": "transfers between engines are not supported",
    "/remote_instance_transfer_engine_info": "transfers between engines are not supported",
    "/get_remote_instance_transfer_engine_info": "transfers between engines are not supported",
    "/parallelism_config": "transfers between engines are not supported",
    "/hicache/storage-backend": "HiCache storage is not supported",
    "/hicache/storage-backend/clear": "HiCache storage is not supported",
    "/get_hicache_l3_cache_layout": "HiCache storage is not supported",
    "/start_expert_distribution_record": "expert distribution records are not supported",
    "/stop_expert_distribution_record": "expert distribution records are not supported",
    "/dump_expert_distribution_record": "expert distribution records are not supported",
    "/set_internal_state": "settings are fixed when the server starts",
    "/pd_role_switch": "disaggregated prefill is not supported",
    "/v1/responses/{rest:path}": "answers are not kept to be asked for later: POST /v1/responses gives them, and "
    "session_params with previous_response_id goes on from one",
    "/v1/messages/batches": f"batches of messages are not supported: {SERVED}",
    "/v1/messages/batches/{rest:path}": f"batches of messages are not supported: {SERVED}",
    **dict.fromkeys(
        ("/score", "/v1/score"),
        f"scoring is not supported: /generate gives log-probabilities of a prompt, with return_logprob; {SERVED}",
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), f"reranking is not supported: {SERVED}"),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/encode"), f"embeddings are not supported: {SERVED}"),
    "/pooling": f"pooling is not supported: {SERVED}",
    "/classify": f"classification is not supported: {SERVED}",
    "/v1/audio/{rest:path}": f"audio is not supported: {SERVED}",
    "/v1/images/{rest:path}": f"images are not supported: {SERVED}",
    "/v1/realtime": f"the Realtime API is not supported: {SERVED}",
    "/v1/tokenize": "this path is called /tokenize here",
    "/v1/detokenize": "this path is called /detokenize here",
}


def _add(path: str, message: str) -> None:
    async def refuse(request: Request) -> Response:
        raise NotSupported(message)

    for method in ("GET", "POST", "PUT", "DELETE"):
        router.add_api_route(path, refuse, methods=[method], include_in_schema=False)


for _path, _message in _PATHS.items():
    _add(_path, _message)

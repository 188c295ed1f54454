"""vLLM's own HTTPVLLMWeightSyncClient (0.32), from its file alone, with a gloo group in place of its NCCL engine.

The file imports three types from a module that needs all of vLLM, which is not installed: they get stand-ins.

python vllm_weight_sync_program.py URL MODEL_FOLDER MODEL_NAME CLIENTS_PY
"""

from __future__ import annotations

import importlib.util
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import requests

from lockstep.tests.clients.gloo_sender import GlooSender


def main(url: str, folder: str, model: str, path: str) -> None:
    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    for name in ("WeightTransferInitRequest", "WeightTransferUpdatePayload", "WeightTransferUpdateRequest"):
        setattr(base, name, dict)
    sys.modules[base.__name__] = base
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[name] = types.ModuleType(name)
    spec = importlib.util.spec_from_file_location("vllm_clients", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.HTTPVLLMWeightSyncClient(url, timeout=60)
    for packed in (False, True):
        sender = GlooSender(folder, packed)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(client.init_weight_transfer_engine, sender.init_info)
            sender.join()
            joining.result()
            requests.post(f"{url}/pause", params={"mode": "keep"}, timeout=60).raise_for_status()
            client.start_weight_update()
            updating = pool.submit(client.update_weights, sender.update_info)
            sender.send()
            updating.result()
        client.finish_weight_update()
        requests.post(f"{url}/resume", timeout=60).raise_for_status()
        found = requests.get(f"{url}/model_info", timeout=60).json()["weight_digest"]
        assert found == sender.digest, (found, sender.digest)
        sender.close()
        try:
            client.finish_weight_update()
            raise AssertionError("a finish without a start was taken")
        except requests.HTTPError as error:
            print(f"as it should be: {error}")
        client.shutdown_weight_transfer_engine()
    print("vLLM's HTTPVLLMWeightSyncClient: done")


main(*sys.argv[1:])

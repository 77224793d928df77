"""Load, list, call and unload a model with the client that is made of the OpenAPI document."""

from pathlib import Path

from adapter_client import Client
from adapter_client.api.sagemaker import invoke_model, list_models, load_model, unload_model
from adapter_client.models import Error, InferenceRequest, LoadRequest

client = Client(base_url="http://127.0.0.1:8080")
url = str(Path("examples/models/identity").absolute())
print(load_model.sync(client=client, body=LoadRequest(model_name="identity", url=url)))
print(list_models.sync(client=client).models)

tensor = {"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
answer = invoke_model.sync(
    "identity", client=client, body=InferenceRequest.from_dict({"inputs": [tensor]})
)
print(answer.outputs[0].data)

print(unload_model.sync("identity", client=client))
answer = unload_model.sync("identity", client=client)
if isinstance(answer, Error):
    print(answer.code, answer.error)

"""The S3 server of chaos.py, on a host of its own: python faulty_store.py FOLDER

A file FOLDER/refuse makes it refuse all requests, as long as it is there; FOLDER/corrupt makes it change a byte of the
newest checkpoint, and is removed then.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import boto3
from s3_server import environment, s3_server

PORT = 9000
BUCKET = "models"


def corrupt_newest(client: Any) -> None:
    """Change a byte of a tensor file of the newest checkpoint, if there is one."""
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    manifests = [entry for entry in listed if entry["Key"].endswith("/manifest.json")]
    if not manifests:
        return
    checkpoint = max(manifests, key=lambda entry: entry["LastModified"])["Key"].rpartition("/")[0]
    names = [entry["Key"] for entry in listed if entry["Key"].startswith(checkpoint)]
    name = random.choice([name for name in names if name.endswith(".safetensors")])
    content = bytearray(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
    content[-1 - random.randrange(1000)] ^= 1
    client.put_object(Bucket=BUCKET, Key=name, Body=bytes(content))


def main(folder: Path) -> None:
    """Serve until this process is ended."""
    with s3_server(("0.0.0.0", PORT)) as proxy:
        os.environ.update(environment(f"http://127.0.0.1:{proxy.port}"))
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        refuse = folder / "refuse"
        corrupt = folder / "corrupt"
        proxy.fault = lambda method, path: "AccessDenied" if refuse.exists() else None
        print("serves", flush=True)
        while True:
            proxy.requests.clear()
            if corrupt.exists():
                corrupt_newest(client)
                corrupt.unlink()
            time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Upload worked mathematics problems as demonstrations, for `agentrl sft --records_of`.

    python examples/upload_sft_data.py --db mongodb://127.0.0.1:27017 --name math_sft \
        --model assets/demo/model problems.jsonl

Every line of the files is an object with `problem` and `solution`.
"""

import argparse
import asyncio
from typing import Any

from rich import print as show

from agentrl.plugins.sft.demonstrations.upload import Exchange, UploadConfig, Uploader


class MathUploader(Uploader):
    """Uploads one question with one worked answer per item."""

    def validate_task(self, item: Any) -> bool:
        """Leave out problems without a boxed answer."""
        return "\\boxed" in item["solution"]

    def req_and_resp(self, item: Any) -> list[Exchange]:
        """Return the one model call of a problem."""
        messages = [
            {"role": "system", "content": "Reason step by step and give the answer in \\boxed{}."},
            {"role": "user", "content": item["problem"]},
        ]
        return [({"messages": messages}, {"role": "assistant", "content": item["solution"]})]


def main() -> None:
    """Upload, and show the result of every item."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--db", required=True, help="MongoDB connection string")
    parser.add_argument("--name", required=True, help="name of the database")
    parser.add_argument("--model", required=True, help="whose template writes the messages")
    args = parser.parse_args()
    config = UploadConfig(
        model_name=args.model,
        data_files=args.files,
        mongo_connection_url=args.db,
        mongo_db_name=args.name,
        task_description="mathematics",
    )
    show(asyncio.run(MathUploader(config).upload()).table())


if __name__ == "__main__":
    main()

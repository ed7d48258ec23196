from tests.end_to_end.corpus import *


def test_probe(small, tmp_path):
    print((small.plain / "metrics.jsonl").read_text())
    print((small.fused / "metrics.jsonl").read_text())
    r = write_recipe(
        small.text / "ft.toml",
        {
            "fusion": {"encoder": str(small.bert), "finetune": True, "layer": -2},
            "train": {"max_steps": 5},
        },
    )
    succeed("bertfused train", r, "--data", small.data, "--out", tmp_path / "ft")
    import subprocess

    print(subprocess.run(["find", tmp_path / "ft"], capture_output=True, text=True).stdout)
    print(succeed("bertfused translate", tmp_path / "ft", stdin=b"the old\n").lines)
    print(
        succeed(
            "bertfused evaluate",
            tmp_path / "ft",
            "--source",
            small.text / "dev.en",
            "--reference",
            small.text / "dev.de",
        ).lines
    )
    print((tmp_path / "ft" / "metrics.jsonl").read_text())

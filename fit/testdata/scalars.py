"""Prints the scalars that TensorBoard reads from a directory: name, step and value of each."""
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}).Reload()
for tag in events.Tags()["scalars"]:
    for e in events.Scalars(tag):
        print(tag, e.step, float(e.value))

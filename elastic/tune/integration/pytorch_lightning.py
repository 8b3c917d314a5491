"""Not supported: importing it raises ImportError, which `from ... import` passes on."""

raise ImportError(
    "elastic.tune.integration.pytorch_lightning: Ray has it, and there is none here: give the "
    "Lightning Trainer callbacks=[elastic.train.lightning.RayTrainReportCallback()], which reports "
    "what was logged with a checkpoint, or call elastic.tune.report(...) in a callback of your own"
)

"""Client of a shared flow in the training process: joins the flow, requests samples ahead, and collates batches."""

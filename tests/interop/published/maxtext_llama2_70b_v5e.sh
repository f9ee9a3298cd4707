# Settings of AI-Hypercomputer/maxtext, src/maxtext/configs/tpu/v5e/llama2_70b.sh.
python3 -m maxtext.trainers.pre_train.train base.yml \
    model_name=llama2-70b \
    per_device_batch_size=2 \
    remat_policy=qkv_proj_offloaded \
    use_iota_embed=True

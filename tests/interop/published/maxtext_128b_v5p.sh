# Settings of AI-Hypercomputer/maxtext, src/maxtext/configs/tpu/v5p/128b.sh.
python3 -m maxtext.trainers.pre_train.train base.yml \
    per_device_batch_size=1 \
    remat_policy=minimal \
    global_parameter_scale=128 \
    ici_fsdp_parallelism=-1 \
    ici_tensor_parallelism=8 \
    max_target_length=2048 \
    use_iota_embed=True \
    attention=flash \
    quantization=

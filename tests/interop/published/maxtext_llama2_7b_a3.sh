# Settings of AI-Hypercomputer/maxtext, src/maxtext/configs/gpu/a3/llama_2_7b/16vm.sh.
python3 -m maxtext.trainers.pre_train.train base.yml \
    dcn_data_parallelism=16 \
    ici_fsdp_parallelism=8

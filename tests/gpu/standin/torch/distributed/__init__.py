def init_process_group(backend):
    pass


def destroy_process_group():
    pass

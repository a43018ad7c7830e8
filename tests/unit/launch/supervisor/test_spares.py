from tensorforge.launch.supervisor.spares import EXITS_TOLERATED, Spares


def test_a_spare_bears_the_name_of_the_worker_that_it_will_be():
    spares = Spares(2, ("torch",))
    assert spares.to_start(["worker-3", "worker-4"]) == ["worker-3", "worker-4"]
    assert spares.to_start(["worker-3", "worker-4"]) == []
    assert spares.take("worker-3")
    assert not spares.take("worker-3")
    assert spares.to_start(["worker-4", "worker-5"]) == ["worker-5"]


def test_without_anything_to_import_there_is_no_spare():
    assert Spares(1, ()).to_start(["worker-1"]) == []
    assert Spares(0, ("torch",)).to_start(["worker-1"]) == []


def test_spares_that_keep_dying_are_given_up():
    spares = Spares(1, ("torch",))
    for _ in range(EXITS_TOLERATED + 1):
        assert spares.to_start(["worker-1"]) == ["worker-1"]
        assert spares.exited("worker-1")
    assert spares.to_start(["worker-1"]) == []
    assert not spares.take("worker-1")


def test_a_worker_that_ends_is_no_spare():
    spares = Spares(1, ("torch",))
    spares.to_start(["worker-1"])
    spares.take("worker-1")
    assert not spares.exited("worker-1")

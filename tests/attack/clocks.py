"""Wall clocks that jump, and hosts whose clocks differ by hours."""

from tests.attack.arena import goes_on, interposed, told, train, whole

HOUR = 3600


def jumps(folder, chance):
    """The clock is set in the middle of a training, by hours or years, to and fro."""
    clock, jump = folder / "clock", chance.choice([-90 * 24 * HOUR, -HOUR, HOUR, 900 * 24 * HOUR])
    clock.write_text("0")

    def during(running):
        running.wait_for(lambda: "step-00000004" in running.output, timeout_seconds=60, what="a save")
        for offset in (jump, 0, -jump // 2):
            clock.write_text(str(offset))
            running.wait_for(lambda: True, timeout_seconds=1, what="")

    environment = {"LD_PRELOAD": interposed(), "ATTACK_CLOCK": str(clock), "STEP_SECONDS": "0.1"}
    finished = train(folder, ranks=2, env=environment, during=during, hang_timeout_seconds=5)
    finished.check()
    whole(folder, 2)
    return f"the clock jumps by {jump / HOUR:+,.0f} h and back"


def differ(folder, chance):
    """Each rank's clock says another hour; one is then asked to stop."""
    clock, hours = folder / "clock", [chance.randrange(-48, 48) for _ in range(2)]
    for rank, offset in enumerate(hours):
        clock.with_name(f"clock.{rank}").write_text(str(offset * HOUR))

    def stop(running):
        running.wait_for(lambda: "step-00000008" in running.output, timeout_seconds=60, what="a save")
        running.ranks()[chance.randrange(2)].terminate()

    environment = {"LD_PRELOAD": interposed(), "ATTACK_CLOCK": str(clock), "STEP_SECONDS": "0.3"}
    told(train(folder, ranks=2, env=environment, during=stop), 75)
    goes_on(folder, 2)
    return f"clocks of two ranks, {hours[0]:+} h and {hours[1]:+} h, and a stop"


ATTACKS = {"clock jumps": jumps, "clocks differ by hours": differ}

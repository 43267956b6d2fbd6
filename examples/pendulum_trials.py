"""Run the pendulum's driver in episodes of 5 s that start at random angles, to measure a policy's return on the robot.

python pendulum_trials.py --config robot.yaml
"""

import sys

from pendulum_driver import Pendulum

from td3_robot.driver.node import main

if __name__ == "__main__":
    sys.exit(main(Pendulum(trial_steps=250), "pendulum"))

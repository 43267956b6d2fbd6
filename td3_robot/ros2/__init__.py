"""ROS 2: a driver for robots with a ROS 2 interface. The docstring of a module names rclpy if the module imports it."""

"""ROS 2: a driver for robots with a ROS 2 interface. A module that imports rclpy says so in its docstring."""

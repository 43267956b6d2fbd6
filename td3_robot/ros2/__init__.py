"""ROS 2: a driver for robots with a ROS 2 interface. Only the modules that say so import rclpy."""

"""ROS 2 nodes: a driver, an operator and a monitor. Only ``lifecycle`` needs rclpy at its import."""

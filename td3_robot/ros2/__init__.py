"""ROS 2 nodes: a driver, an operator and a monitor.

The import of ``lifecycle`` needs rclpy. The import of the other modules does not.
"""

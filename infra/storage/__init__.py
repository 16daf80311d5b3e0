"""Files and objects: the two seams to the outside, a disk and S3, and what their errors mean."""

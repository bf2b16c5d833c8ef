"""Ask which measure of a belief leaves its healthy band before the loss says something, and by how many steps."""

"""Scripts and classes of other libraries; a package, so that its folders are not taken for theirs (`hfai`)."""
